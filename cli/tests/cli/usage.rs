//! Arguments, help and error messages.

use crate::common::place::*;
use crate::common::root;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use tpde::{Codec, CodecChoice, Favor};

#[test]
fn bad_usage_ends_with_2() {
    let place = Place::with_pair();
    let lines = [
        "",
        "no-such-verb",
        "encode base.safetensors -o x",
        "encode base.safetensors target.safetensors",
        "encode --no-base base.safetensors target.safetensors -o x",
        "encode a b c -o x",
        "encode base.safetensors target.safetensors -o x --codec lzma",
        "encode base.safetensors target.safetensors -o x --layout best",
        "encode base.safetensors target.safetensors -o x --rename nothing",
        "apply pair -o x",
        "verify",
        "inspect pair --tensors --chunks",
        "merge -o x",
        "merge pair",
        "subset pair -o x",
        "subset pair pair --tensor a -o x",
        "subset pair --tensor [ -o x",
        "subset pair --part a -o x",
        "subset pair --part a=[0:1 -o x",
        "subset pair --part a=[0] -o x",
        "subset pair --part a=[0:-1] -o x",
        "subset pair --part [=[0:1] -o x",
        "inspect pair --explain --chunks",
        "inspect pair --base base.safetensors",
        "inspect pair --no-base",
        "inspect pair --favor size",
        "inspect pair --explain --base base.safetensors --no-base",
        "inspect pair -T 100000",
        "inspect pair -q -v",
        "bench base.safetensors target.safetensors --runs 0",
        "completions tcsh",
    ];
    for line in lines {
        let run = place.tpde(line);
        assert_eq!((run.code, run.out.as_str()), (USAGE, ""), "{line}: {}", run.err);
    }
    assert_eq!(place.fails("inspect", USAGE, "required")["kind"], "usage");
}

#[test]
fn checkpoints_elsewhere_are_downloaded_first() {
    let place = Place::with_pair();
    for (path, hint) in [
        ("s3://bucket/model.safetensors", "download the files first"),
        ("https://host/owner/model/resolve/main/model.safetensors", "download the files first"),
        ("owner/Model-8B", "hf download"),
    ] {
        for line in [
            format!("encode base.safetensors {path} -o x"),
            format!("apply {path} pair -o x"),
            format!("verify pair --base {path}"),
        ] {
            let error = place.fails(&line, SYSTEM, "");
            assert!(error["hint"].as_str().is_some_and(|found| found.contains(hint)), "{line}: {error}");
        }
    }
    assert_eq!(place.fails("encode base.safetensors nowhere.safetensors -o x", SYSTEM, "nowhere")["hint"], serde_json::Value::Null);
}

#[test]
fn arguments_that_are_swapped_or_missing_have_a_hint() {
    let place = Place::with_pair();
    for (line, code, hint) in [
        ("apply pair base.safetensors -o x", SYSTEM, "are two arguments swapped"),
        ("apply base.safetensors target.safetensors -o x", SYSTEM, "are two arguments swapped"),
        ("encode pair base.safetensors -o x", SYSTEM, "are two arguments swapped"),
        ("verify base.safetensors --base pair", SYSTEM, "are two arguments swapped"),
        ("inspect https://host/pair", SYSTEM, "download the files first"),
        ("inspect nowhere", SYSTEM, "named without its endings"),
        ("apply pair -o x --no-base", DATA, "pass that as BASE"),
        ("store log nowhere", DATA, "tpde store init"),
        ("store put base base.safetensors", DATA, "tpde store init"),
    ] {
        let error = place.fails(line, code, "");
        assert!(error["hint"].as_str().is_some_and(|found| found.contains(hint)), "{line}: {error}");
    }
    place.ok("store init versions");
    place.ok("store put versions base.safetensors");
    let error = place.fails("store get versions main@7 -o x", DATA, "");
    assert!(error["hint"].as_str().is_some_and(|found| found.contains("versions are named BRANCH@NUMBER")), "{error}");
    let error = place.fails("store get versions main -o base.safetensors", SYSTEM, "choose another output");
    assert!(error["hint"].is_null(), "{error}");
}

#[test]
fn messages_say_what_helps() {
    let place = Place::with_pair();
    let message = |line: &str, code| place.fails(line, code, "")["message"].as_str().unwrap().to_owned();
    assert!(message("encode base.safetensors", USAGE).contains("<TARGET>"));
    assert!(message("encode base.safetensors", USAGE).contains("--output <OUT>"));
    assert!(message("", USAGE).contains("requires a subcommand"));
    assert!(message("inspec pair", USAGE).contains("inspect"));
    for line in ["man --dir base.safetensors", "demo --dir base.safetensors"] {
        let error = place.fails(line, SYSTEM, "directory");
        assert!(error["hint"].is_null() && error["message"].as_str().unwrap().contains("base.safetensors"), "{error}");
    }
    // A stack of 300 MB does not fit in the address space. Many small stacks would instead leave too little for the allocations of
    // the threads.
    let limited = format!("ulimit -v 600000; RUST_MIN_STACK=300000000 exec {TPDE} -T 1024 inspect pair");
    let run = place.command("sh", &["-c", &limited]);
    assert_eq!((run.code, run.out.as_str()), (SYSTEM, ""), "{}", run.err);
    assert!(run.err.contains("cannot start threads") && run.err.contains("--threads"), "{}", run.err);
}

#[test]
fn patterns_that_are_too_large_are_refused() {
    let place = Place::with_pair();
    for pattern in [format!("{}w{}", "{a,".repeat(130), "}".repeat(130)), "*".repeat(100_000)] {
        let run = place.command(TPDE, &["apply", "base.safetensors", "pair", "-o", "out", "--tensor", &pattern]);
        assert_eq!(run.code, USAGE, "{}", run.err);
        assert!(run.err.contains("too large") && run.err.len() < 2000, "{}", run.err);
    }
}

#[test]
fn long_arguments_are_cut_in_messages_and_escaped() {
    let place = Place::with_pair();
    let long = "x".repeat(50_000);
    let bad_pattern = format!("[{long}");
    let option = format!("--{long}");
    let apply = ["apply", "base.safetensors", "pair", "-o", "out", "--tensor"];
    for arguments in [
        &[&apply[..], &[&long]].concat(),
        &[&apply[..], &[&bad_pattern]].concat(),
        &vec!["inspect", "pair", &option],
        &vec!["inspect", "pair", &long],
        &vec![&long[..]],
        &vec!["inspect", "pair", "--threads", &long],
        &vec!["encode", "a", "b", "-o", "c", "--codec", &long],
        &vec!["encode", "a", "b", "-o", "c", "--rename", &long],
        &vec!["verify", "pair", "--device", &long],
        &vec!["completions", &long],
    ] {
        let run = place.command(TPDE, &[&arguments[..], &["--json"]].concat());
        assert_eq!(run.code, USAGE, "{}", run.err);
        assert!(run.err.contains("xxx…xxx") && run.err.len() < 2000 && run.out.len() < 2000, "{} {}", run.err, run.out);
    }
    let run = place.command(TPDE, &["verify", "pair", "--device", "\u{1b}[2J"]);
    assert!(run.code == USAGE && run.err.contains("\\u{1b}[2J") && !run.err.contains('\u{1b}'), "{}", run.err);
}

#[test]
fn help_is_text_and_a_value_of_json_is_an_error_in_json() {
    let place = Place::with_pair();
    for line in ["--json --help", "inspect --json -h", "--json help inspect", "--json --version"] {
        let run = place.ok(line);
        assert!(run.out.starts_with("tpde ") || run.out.contains("Usage: tpde"), "{line}: {}", run.out);
    }
    assert!(place.ok("--help").out.contains("help and version are always text"));
    for line in ["inspect pair --json=1", "inspect --json=", "--json=true inspect pair"] {
        let run = place.tpde(line);
        let report: serde_json::Value = serde_json::from_str(&run.out).unwrap_or_else(|e| panic!("{line}: {e} {}", run.out));
        assert_eq!((run.code, &report["error"]["kind"]), (USAGE, &"usage".into()), "{line}");
    }
    let run = place.tpde("inspect -- --json --json=1");
    assert_eq!((run.code, run.out.as_str()), (USAGE, ""), "{}", run.err);
}

#[test]
fn help_completions_and_manual_pages_are_there() {
    let place = Place::new();
    let verbs = [
        "encode",
        "apply",
        "verify",
        "inspect",
        "fold",
        "revert",
        "merge",
        "subset",
        "store",
        "bench",
        "demo",
        "completions",
        "man",
    ];
    let all = place.ok("--help").out;
    for verb in verbs {
        assert!(all.contains(verb));
        let help = place.ok(&format!("{verb} --help")).out;
        assert!(help.contains("Usage: ") && help.contains("--json"), "{help}");
    }
    assert!(place.ok("--version").out.starts_with("tpde "));
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        assert!(place.ok(&format!("completions {shell}")).out.contains("rename-map"));
    }
    assert!(place.ok("man").out.contains(".TH tpde 1"));
    place.ok("man --dir pages");
    let pages = place.path("pages").read_dir().unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let (of_store, others): (Vec<_>, Vec<_>) = pages.partition(|page| page.starts_with("tpde-store-"));
    assert_eq!(others.len(), 1 + verbs.len());
    assert!(["put.1", "branch-create.1"].iter().all(|page| of_store.contains(&format!("tpde-store-{page}"))), "{of_store:?}");
    assert!(fs::read_to_string(place.path("pages/tpde-encode.1")).unwrap().contains("rename"));
}

/// A new verb or option takes the place of another. The limits are raised only with a reason.
#[test]
fn the_program_stays_small() {
    let place = Place::new();
    // Aliases are in the line of their verb. clap adds `help`.
    let verbs = |line: &str| {
        let help = place.ok(line).out;
        let lines = help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
        let names =
            lines.filter_map(|line| line.strip_prefix("  ")?.split(' ').next()).filter(|name| !matches!(*name, "" | "help"));
        names.map(String::from).collect::<BTreeSet<_>>()
    };
    let all = verbs("--help");
    assert!(all.contains("encode") && all.len() <= 13, "{all:?}");
    if all.contains("store") {
        let of_store = verbs("store --help");
        assert!(of_store.contains("put") && of_store.len() <= 12, "{of_store:?}");
    }

    let help = place.ok("encode -h").out;
    let words = help.lines().filter_map(|line| line.trim_start().strip_prefix('-').map(|_| line.split_whitespace().take(2)));
    let options: BTreeSet<_> = words.flatten().filter(|word| word.starts_with("--")).collect();
    assert!(options.contains("--output") && options.contains("--codec") && options.len() <= 26, "{options:?}");
}

#[test]
fn help_documents_and_docstrings_say_the_same_of_what_codecs_and_favors_are_for() {
    let place = Place::new();
    place.ok("man --dir pages");
    let page = fs::read_to_string(place.path("pages/tpde-encode.1")).unwrap().replace('\\', "");
    let (help, summary) = (place.ok("encode --help").out, place.ok("encode -h").out);
    let read = |path: &str| fs::read_to_string(root().join(path)).unwrap();
    let (guide, python, options) = (read("docs/cli.md"), read("python/tpde/_files/paths.py"), read("src/encode/options.rs"));
    let codecs = CodecChoice::ALL.iter().map(|choice| ("--codec", choice.name(), choice.job(), *choice == CodecChoice::default()));
    let favors = Favor::ALL.iter().map(|favor| ("--favor", favor.name(), favor.job(), *favor == Favor::default()));
    let mut rows = Vec::new();
    for (option, name, job, default) in codecs.chain(favors) {
        let row = format!("  {option} {name:<13}{job}");
        let found = help.lines().position(|line| line == format!("{row}{}", if default { " [default]" } else { "" }));
        rows.push(found.unwrap_or_else(|| panic!("{row} in {help}")));
        // Each row fits on one line of a narrow terminal.
        assert!(row.len() <= 80 && !summary.contains(job), "{row}");
        assert!(page.contains(job), "{job} in {page}");
        let default = if default { " The default." } else { "" };
        assert!(guide.contains(&format!("| `{option} {name}` | {job}{default} |")), "{option} {name} in docs/cli.md");
        let documented = options.contains(&format!("    /// {job}\n")) || Codec::ALL.iter().any(|codec| codec.name() == name);
        assert!(documented, "{name} in src/encode/options.rs");
        assert!(python.contains(&format!("- ``\"{name}\"``: {job}\n")), "{name} in python/tpde/_files/paths.py");
    }
    assert!(rows.windows(2).all(|rows| rows[0] + 1 == rows[1]), "one table: {help}");
}

#[test]
fn help_and_documents_say_that_small_chunks_have_short_streams() {
    let help = Place::new().ok("encode --help").out;
    let words: Vec<_> = help.split_whitespace().collect();
    assert!(words.join(" ").contains("Below the default, --favor ratio also divides chunks into more streams"), "{help}");
    let document = fs::read_to_string(root().join("docs/cli.md")).unwrap();
    assert!(document.contains("`--favor ratio` also divides a chunk into more streams"));
}

#[test]
fn the_demo_succeeds() {
    let place = Place::new();
    let text = place.ok("demo --dir here").out;
    assert!(text.contains("$ tpde encode ") && text.contains("success: "), "{text}");
    place.assert_same("here/rebuilt.safetensors", "here/tuned.safetensors");
    place.fails("demo --dir here", SYSTEM, "exists");
    place.ok("demo --dir=-here -q");
    assert_eq!(place.json("demo --dir here -f")["identical"], true);

    let report = place.json("demo --keep");
    let dir = Path::new(report["dir"].as_str().unwrap()).to_owned();
    assert!(dir.join("update.tpde-index").exists());
    fs::remove_dir_all(dir).unwrap();
    let report = place.json("demo");
    assert!(!Path::new(report["dir"].as_str().unwrap()).exists());
}

#[test]
fn a_demo_whose_reader_has_gone_leaves_no_folder() {
    let place = Place::new();
    let script = format!("TMPDIR=. {TPDE} demo | true");
    place.command("bash", &["-c", &script]);
    assert!(place.names().is_empty(), "{:?}", place.names());
}
