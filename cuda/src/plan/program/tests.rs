//! Programs as text, and the order that they guarantee.

use super::*;
use crate::plan::schedule::{Group, Piece, Run};
use proptest::prelude::*;
use std::fmt::Write;
use tpde::InPlace;

const KINDS: [Mode; 3] = [Mode::OutOfPlace, Mode::InPlace(InPlace::ChunkByChunk), Mode::InPlace(InPlace::AllChecked)];

/// A slice with a run per group, of tensors with these variants.
fn slice(groups: &[Group], has: [bool; 3]) -> Slice {
    let runs = groups.iter().map(|&group| Run { group, order: 0..1, has }).collect();
    let mut pieces: Vec<_> = groups.iter().map(|&group| group == Group::Expanded).collect();
    pieces.dedup();
    let piece = |is_expanded| Piece { blob: 0, at: 0, bytes: 16, staged: 0..1, is_expanded };
    Slice { runs, pieces: pieces.into_iter().map(piece).collect() }
}

fn queue_name(queue: Queue) -> String {
    match queue {
        Queue::Caller => "caller".into(),
        Queue::Copies => "copies".into(),
        Queue::PayloadDigests => "payload digests".into(),
        Queue::TargetDigests => "target digests".into(),
        Queue::Side(n) => format!("side {n}"),
    }
}

/// What an operation does, and the class of its work.
fn work_text(work: Work, request: &Request, slices: &[Slice]) -> String {
    let runs = |n: usize| -> String {
        let variants = ["plain", "strided", "derived"];
        let text = |run: &Run| {
            let has: Vec<_> = variants.iter().zip(run.has).filter(|(_, has)| *has).map(|(name, _)| *name).collect();
            format!("{:?} {}", run.group, has.join("+")).to_lowercase()
        };
        slices[n].runs.iter().map(text).collect::<Vec<_>>().join(", ")
    };
    let how = match request.mode {
        Mode::OutOfPlace => "out of place",
        Mode::InPlace(InPlace::AllChecked) => "dry",
        Mode::InPlace(_) => "in place",
    };
    match work {
        Work::Point => "point".into(),
        Work::Copy(n) => format!("copy payloads of slice {n}"),
        Work::Send(n) => format!("host: read payloads of slice {n}, copy them through the ring"),
        Work::HashPayloads(n) => format!("hash payloads of slice {n}"),
        Work::ComparePayloadRoot => "compare the payload root".into(),
        Work::ExpandFrames(n) => format!("expand frames of slice {n}"),
        Work::Decode(n) => format!("decode slice {n}, {how}: {}", runs(n)),
        Work::Rebuild(n) => format!("rebuild batch {n} in scratch memory"),
        Work::CompareBatch(n) => format!("hash and compare batch {n}"),
        Work::CompareStored => "hash and compare the targets".into(),
        Work::Commit(n) => format!("if no check failed: commit slice {n}: {}", runs(n)),
        Work::CopyStatuses => "copy status words".into(),
        Work::CopyFrameStatuses => "copy status words of frames".into(),
    }
}

fn text(program: &Program, request: &Request, slices: &[Slice]) -> String {
    let mut text = String::new();
    for (number, operation) in program.operations.iter().enumerate() {
        let queue = queue_name(operation.queue);
        let after: Vec<_> = operation.after.iter().map(ToString::to_string).collect();
        let after = if after.is_empty() { String::new() } else { format!("; after {}", after.join(", ")) };
        writeln!(text, "{number:>4}  {queue:<15}  {}{after}", work_text(operation.work, request, slices)).unwrap();
    }
    text
}

/// Programs of all kinds, with a title each.
fn programs() -> String {
    const PLAIN: [bool; 3] = [true, false, false];
    let (each, root, none) = (PayloadChecks::Each, PayloadChecks::Root, PayloadChecks::None);
    let conditioned = || slice(&[Group::Conditioned], PLAIN);
    let [one, three] = [1, 3].map(|count| (0..count).map(|_| conditioned()).collect::<Vec<_>>());
    let mixed = vec![slice(&[Group::Conditioned, Group::WithoutBase, Group::Expanded], PLAIN), slice(&[Group::Raw], PLAIN)];
    let strided = vec![slice(&[Group::Conditioned], [false, true, false]), slice(&[Group::Conditioned], [false, false, true])];
    let ten = (0..10).map(|_| conditioned()).collect::<Vec<_>>();
    let frames = vec![slice(&[Group::Raw, Group::Frames], [true, true, false])];
    let whole = Variation::Whole;
    let targets = |mode, count| if mode == KINDS[2] { TargetChecks::Batches(count) } else { TargetChecks::Stored };
    let mut all = String::new();
    let mut add = |title: &str, slices: &[Slice], mode, origin, checks: (PayloadChecks, TargetChecks), variation| {
        let has_frames = slices.iter().flat_map(|slice| &slice.runs).any(|run| run.group == Group::Frames);
        let request = Request { mode, payload_checks: checks.0, target_checks: checks.1, has_frames };
        let program = Program::new(request, slices, origin, variation);
        writeln!(all, "{title}\n{}", text(&program, &request, slices)).unwrap();
    };
    for (mode, name) in KINDS.into_iter().zip(["out of place", "chunk by chunk", "all checked"]) {
        let no_checks = (none, TargetChecks::None);
        add(&format!("{name}, on the device, no digests"), &one, mode, Origin::Device, no_checks, whole);
        add(&format!("{name}, on the device, digests"), &one, mode, Origin::Device, (each, targets(mode, 1)), whole);
        add(&format!("{name}, pinned, one slice, digests"), &one, mode, Origin::Pinned, (each, targets(mode, 1)), whole);
        add(&format!("{name}, pinned, no digests"), &three, mode, Origin::Pinned, no_checks, whole);
        add(&format!("{name}, pinned, digests"), &three, mode, Origin::Pinned, (each, targets(mode, 3)), whole);
        add(&format!("{name}, host, payload root"), &three, mode, Origin::Host, (root, targets(mode, 3)), whole);
        add(&format!("{name}, pinned, several codecs"), &mixed, mode, Origin::Pinned, (each, targets(mode, 2)), whole);
        add(&format!("{name}, host, strided and derived"), &strided, mode, Origin::Host, (each, targets(mode, 1)), whole);
        add(&format!("{name}, graph, pinned"), &three, mode, Origin::Pinned, (each, targets(mode, 3)), Variation::Serial);
        add(
            &format!("{name}, graph, on the device, root"),
            &one,
            mode,
            Origin::Device,
            (root, targets(mode, 2)),
            Variation::Serial,
        );
        add(&format!("{name}, frames"), &frames, mode, Origin::Host, (root, targets(mode, 2)), whole);
        add(&format!("{name}, nothing to decode"), &[], mode, Origin::Host, (root, targets(mode, 0)), whole);
    }
    add(
        "all checked, without commit",
        &three,
        KINDS[2],
        Origin::Pinned,
        (each, TargetChecks::Batches(2)),
        Variation::WithoutCommit,
    );
    add("out of place, more slices than sides", &ten, KINDS[0], Origin::Pinned, (each, TargetChecks::Stored), whole);
    all
}

/// The programs of all kinds of launches. `TPDE_BLESS=1` writes the file: a change is reviewed as a difference of text.
#[test]
fn programs_are_those_of_the_file() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src/plan/program/programs.txt");
    let found = programs();
    if std::env::var_os("TPDE_BLESS").is_some() {
        std::fs::write(&path, &found).unwrap();
    }
    let expected = std::fs::read_to_string(&path).unwrap();
    for (number, (expected, found)) in (1..).zip(expected.lines().zip(found.lines())) {
        assert_eq!(expected, found, "{} line {number}", path.display());
    }
    assert_eq!(expected.len(), found.len(), "{}", path.display());
}

/// For each operation, which others have completed when it begins: those before it on its queue, those that it waits for, and all
/// that these have waited for.
fn before(program: &Program) -> Vec<Vec<bool>> {
    let operations = &program.operations;
    let mut before = vec![vec![false; operations.len()]; operations.len()];
    for (number, operation) in operations.iter().enumerate() {
        let on_queue = (0..number).rev().find(|&other| operations[other].queue == operation.queue);
        for other in operation.after.iter().copied().chain(on_queue) {
            assert!(other < number, "an operation waits for a later one");
            let (earlier, own) = before.split_at_mut(number);
            own[0].iter_mut().zip(&earlier[other]).for_each(|(own, earlier)| *own |= earlier);
            own[0][other] = true;
        }
    }
    before
}

fn requests() -> impl Strategy<Value = (Request, Vec<Slice>, Origin, Variation)> {
    let groups = prop::sample::select(vec![Group::Conditioned, Group::WithoutBase, Group::Raw, Group::Expanded]);
    let slice = prop::collection::vec(groups, 1..4).prop_map(|groups| slice(&groups, [true, false, false]));
    let checks = prop::sample::select(vec![PayloadChecks::None, PayloadChecks::Each, PayloadChecks::Root]);
    let origin = prop::sample::select(vec![Origin::Device, Origin::Pinned, Origin::Host]);
    let variation = prop::sample::select(vec![Variation::Whole, Variation::WithoutCommit, Variation::Serial]);
    let frames = Just(vec![self::slice(&[Group::Raw, Group::Frames], [true; 3])]);
    let slices = prop_oneof![5 => prop::collection::vec(slice, 0..20), 1 => frames];
    (prop::sample::select(KINDS.to_vec()), checks, 0usize..6, any::<bool>(), slices, origin, variation).prop_map(
        |(mode, payload_checks, batches, compares_targets, slices, origin, variation)| {
            let target_checks = match (compares_targets, mode) {
                (false, _) => TargetChecks::None,
                (true, Mode::InPlace(InPlace::AllChecked)) => TargetChecks::Batches(batches),
                (true, _) => TargetChecks::Stored,
            };
            let has_frames = slices.iter().flat_map(|slice| &slice.runs).any(|run| run.group == Group::Frames);
            (Request { mode, payload_checks, target_checks, has_frames }, slices, origin, variation)
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, ..ProptestConfig::default() })]
    #[test]
    fn operations_wait_for_what_they_need((request, slices, origin, variation) in requests()) {
        let program = Program::new(request, &slices, origin, variation);
        let before = before(&program);
        let operations = &program.operations;
        let numbers = |is: &dyn Fn(Work) -> bool| -> Vec<usize> {
            (0..operations.len()).filter(|&number| is(operations[number].work)).collect()
        };
        let all_before = |number: usize, others: &[usize]| others.iter().all(|&other| before[number][other]);
        let checks = |work: Work| matches!(work, Work::Decode(_) | Work::HashPayloads(_) | Work::ComparePayloadRoot | Work::CompareBatch(_));
        for (number, operation) in operations.iter().enumerate() {
            // Nothing but copies begins before the work that the caller has queued.
            let is_copy = matches!(operation.work, Work::Copy(_) | Work::Send(_));
            prop_assert!(number == 0 || is_copy || before[number][0], "{operation:?}");
            // Everything ends before what the caller queues next.
            let end = operations.iter().rposition(|operation| operation.queue == Queue::Caller).unwrap();
            prop_assert!(number == end || before[end][number], "{operation:?}");
            // A wait that follows from others is left out.
            prop_assert!(operation.after.iter().all(|&one| operations[one].queue != operation.queue));
            let uses = operations.iter().filter(|other| other.after.contains(&number)).count();
            prop_assert_eq!(operation.awaited, uses);
            match operation.work {
                Work::HashPayloads(n) | Work::ExpandFrames(n) | Work::Decode(n) => {
                    let copies = numbers(&|work| work == Work::Copy(n) || work == Work::Send(n));
                    prop_assert!(all_before(number, &copies));
                    prop_assert!(origin == Origin::Device || !copies.is_empty());
                    if program.compares_first && !matches!(operation.work, Work::HashPayloads(_)) {
                        prop_assert!(all_before(number, &numbers(&|work| work == Work::HashPayloads(n) || work == Work::ComparePayloadRoot)));
                    }
                    if let Work::Decode(_) = operation.work {
                        prop_assert!(all_before(number, &numbers(&|work| work == Work::ExpandFrames(n))));
                    }
                }
                Work::ComparePayloadRoot => prop_assert!(all_before(number, &numbers(&|work| matches!(work, Work::HashPayloads(_))))),
                Work::Rebuild(n) => {
                    prop_assert!(all_before(number, &numbers(&|work| matches!(work, Work::Copy(_) | Work::Send(_) | Work::ExpandFrames(_)))));
                    prop_assert!(n < 2 || all_before(number, &numbers(&|work| work == Work::CompareBatch(n - 2))));
                }
                Work::CompareBatch(n) => prop_assert!(all_before(number, &numbers(&|work| work == Work::Rebuild(n)))),
                Work::CompareStored => prop_assert!(all_before(number, &numbers(&|work| matches!(work, Work::Decode(_))))),
                Work::Commit(_) => {
                    prop_assert!(all_before(number, &numbers(&checks)));
                    prop_assert!(request.mode == KINDS[2] && variation != Variation::WithoutCommit);
                }
                _ => {}
            }
        }
        // Each slice is decoded once, and committed once if at all.
        for n in 0..slices.len() {
            prop_assert_eq!(numbers(&|work| work == Work::Decode(n)).len(), 1);
            let commits = usize::from(request.mode == KINDS[2] && variation != Variation::WithoutCommit);
            prop_assert_eq!(numbers(&|work| work == Work::Commit(n)).len(), commits);
        }
        // In place, no chunk is written before the digest of its payload is compared.
        if request.mode == KINDS[1] && request.payload_checks == PayloadChecks::Each {
            prop_assert!(program.compares_first);
        }
        prop_assert!(variation != Variation::Serial || operations.iter().all(|operation| operation.queue == Queue::Caller));
        let on_host = origin == Origin::Host && !slices.is_empty()
            || origin == Origin::Pinned && slices.iter().flat_map(|slice| &slice.pieces).any(|piece| piece.is_expanded);
        prop_assert_eq!(program.has_host_work(), on_host);
    }
}
