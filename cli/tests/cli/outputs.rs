//! Outputs: replaced and protected files, names, modes, locks, full disks.

use crate::common::place::*;
use crate::common::*;
use serde_json::json;
use std::fs;

#[test]
fn outputs_are_replaced_by_force_alone_and_inputs_never() {
    let place = Place::with_pair();
    let before = (place.read("pair.tpde-index"), place.read("base.safetensors"));
    let error = place.fails("encode base.safetensors target.safetensors -o pair", SYSTEM, "exists");
    assert!(error["hint"].as_str().unwrap().contains("--force"));
    place.fails("apply base.safetensors pair -o target.safetensors", SYSTEM, "exists");
    for line in ["-o base.safetensors", "-o pair.tpde-index", "-o pair.tpde-blob"] {
        place.fails(&format!("apply base.safetensors pair -f {line}"), USAGE, "is the same as input");
    }
    fs::copy(place.path("base.safetensors"), place.path("odd.tpde-blob")).unwrap();
    place.fails("encode odd.tpde-blob target.safetensors -o odd -f", USAGE, "is the same as input odd.tpde-blob");
    assert!(before == (place.read("pair.tpde-index"), place.read("base.safetensors")));
    place.ok("encode base.safetensors target.safetensors -o pair --force");
    place.ok("apply base.safetensors pair -o target.safetensors -f");
}

#[test]
fn a_base_is_never_overwritten_whatever_its_name() {
    let place = Place::with_pair();
    let base = model();
    write_folder(&place.path("base"), &[&base[..2], &base[2..]]);
    let target: Vec<_> = base.iter().map(|tensor| tuned(tensor, 30)).collect();
    write_folder(&place.path("target"), &[&target[..2], &target[2..]]);
    place.ok("encode base target -o sharded");
    // The base is a single file inside the output folder, with the name of a shard of the target.
    place.ok("encode base.safetensors target -o lone");
    fs::create_dir(place.path("out")).unwrap();
    fs::rename(place.path("base.safetensors"), place.path("out/model-00001-of-00002.safetensors")).unwrap();
    let before = place.read("out/model-00001-of-00002.safetensors");
    let line = "apply out/model-00001-of-00002.safetensors lone -f -o";
    place.fails(&format!("{line} out"), USAGE, "output out contains input out/model-00001-of-00002.safetensors");
    assert!(before == place.read("out/model-00001-of-00002.safetensors"));
    // Outputs inside the base, above the base, and at the base under another name.
    std::os::unix::fs::symlink("base", place.path("link")).unwrap();
    place.fails("apply base sharded -o base/out", USAGE, "output base/out is inside input base");
    place.fails("apply base sharded -o link/out", USAGE, "output link/out is inside input base");
    place.fails("apply link sharded -o base -f", USAGE, "output base is the same as input link");
    place.fails("apply base sharded -o . -f", USAGE, "output . contains input base");
    place.fails("encode base target -o base/pair", USAGE, "output base/pair.tpde-index is inside input base");
    place.fails("encode base target -o target/pair", USAGE, "output target/pair.tpde-index is inside input target");
    place.ok("apply base sharded -o rebuilt");
}

#[test]
fn no_output_replaces_a_file_that_was_read_whatever_links_lead_there() {
    use std::os::unix::fs::symlink;
    let place = Place::with_pair();
    let tensors = model();
    write_folder(&place.path("shards"), &[&tensors[..2], &tensors[2..]]);
    let target: Vec<_> = tensors.iter().map(|tensor| tuned(tensor, 30)).collect();
    write_folder(&place.path("tuned"), &[&target[..2], &target[2..]]);
    place.ok("encode shards tuned -o sharded");
    fs::write(place.path("map.json"), r#"{"embed.weight": "embed.weight"}"#).unwrap();
    let shard = "model-00001-of-00002.safetensors";
    fs::create_dir(place.path("out")).unwrap();
    // Inputs with the names of outputs.
    fs::copy(place.path("map.json"), place.path("named.tpde-blob")).unwrap();
    fs::hard_link(place.path("map.json"), place.path("hard.tpde-index")).unwrap();
    symlink("map.json", place.path("soft.tpde-index")).unwrap();
    symlink("hard.tpde-index", place.path("soft-map.json")).unwrap();
    fs::hard_link(place.path("base.safetensors"), place.path("hard.safetensors")).unwrap();
    symlink("pair.tpde-blob", place.path("soft.safetensors")).unwrap();
    fs::hard_link(place.path("shards").join(shard), place.path("out").join(shard)).unwrap();
    let contents = |place: &Place| place.names().iter().map(|name| fs::read(place.path(name)).ok()).collect::<Vec<_>>();
    let before = contents(&place);

    let encode = "encode base.safetensors target.safetensors -f";
    for (map, pair) in [
        ("named.tpde-blob", "named"),
        ("map.json", "hard"),
        ("map.json", "soft"),
        ("soft-map.json", "hard"),
        ("soft-map.json", "soft"),
    ] {
        place.fails(&format!("{encode} --rename-map {map} -o {pair}"), USAGE, &format!("is the same as input {map}"));
    }
    for output in ["base.safetensors", "hard.safetensors"] {
        place.fails(&format!("apply base.safetensors pair -f -o {output}"), USAGE, "is the same as input base.safetensors");
    }
    place.fails("apply base.safetensors pair -f -o soft.safetensors", USAGE, "is the same as input pair.tpde-blob");
    place.fails("apply shards sharded -f -o out", USAGE, &format!("is the same as input shards/{shard}"));
    fs::remove_file(place.path("out").join(shard)).unwrap();
    symlink(place.path("shards").join(shard), place.path("out").join(shard)).unwrap();
    place.fails("apply shards sharded -f -o out", USAGE, &format!("is the same as input shards/{shard}"));
    assert!(before == contents(&place));
    place.ok(&format!("{encode} --rename-map map.json -o other"));
}

#[test]
fn what_is_no_regular_file_is_not_replaced_through_links_either() {
    let place = Place::with_pair();
    assert_eq!(place.command("mkfifo", &["pipe"]).code, 0);
    let link = |to: &str, name: &str| std::os::unix::fs::symlink(to, place.path(name)).unwrap();
    link("pipe", "to-pipe");
    link("/proc/self/fd/1", "stdout"); // like /dev/stdout
    link("nothing", "to-nothing");
    let before = place.names();
    for output in ["pipe", "to-pipe", "stdout", "to-nothing"] {
        place.fails(&format!("apply base.safetensors pair -o {output} -f"), SYSTEM, "not a regular file");
        assert_eq!(place.names(), before);
        let file_type = place.path(output).symlink_metadata().unwrap().file_type();
        assert!(!file_type.is_file(), "{output} was replaced");
    }
    fs::create_dir(place.path("pages")).unwrap();
    link("../pipe", "pages/tpde.1");
    place.fails("man --dir pages", SYSTEM, "not a regular file");
    assert_eq!(place.path("pages").read_dir().unwrap().count(), 1);
    // A link to a file is replaced, not the file, because other links may share it.
    fs::write(place.path("shared"), "theirs").unwrap();
    link("shared", "to-shared");
    place.ok("apply base.safetensors pair -o to-shared -f");
    place.assert_same("to-shared", "target.safetensors");
    assert!(!place.path("to-shared").is_symlink());
    assert_eq!(place.read("shared"), b"theirs");
}

#[test]
fn replaced_files_keep_their_modes_and_new_ones_follow_the_umask() {
    use std::os::unix::fs::PermissionsExt;
    let place = Place::with_pair();
    let mode = |name: &str| place.path(name).metadata().unwrap().permissions().mode() & 0o7777;
    let run = |line: &str| {
        let run = place.command("sh", &["-c", &format!("umask 027; exec {TPDE} {line}")]);
        assert_eq!(run.code, 0, "{}", run.err);
    };
    run("apply base.safetensors pair -o out.safetensors");
    run("encode base.safetensors target.safetensors -o other");
    assert_eq!([mode("out.safetensors"), mode("other.tpde-index"), mode("other.tpde-blob")], [0o640; 3]);
    for (name, bits) in [("out.safetensors", 0o606), ("other.tpde-index", 0o600), ("other.tpde-blob", 0o444)] {
        fs::set_permissions(place.path(name), fs::Permissions::from_mode(bits)).unwrap();
    }
    run("apply base.safetensors pair -o out.safetensors -f");
    run("encode base.safetensors target.safetensors -o other -f");
    assert_eq!([mode("out.safetensors"), mode("other.tpde-index"), mode("other.tpde-blob")], [0o606, 0o600, 0o444]);
}

#[test]
fn files_that_would_be_read_with_the_pairs_are_not_left_beside_them() {
    let place = Place::new();
    let base = model();
    let target: Vec<_> = base.iter().map(|tensor| tuned(tensor, 30)).collect();
    for (name, tensors) in [("base", &base), ("target", &target)] {
        write_folder(&place.path(name), &[&tensors[..2], &tensors[2..]]);
        fs::remove_file(place.path(name).join("model.safetensors.index.json")).unwrap();
    }
    place.ok("encode base target -o pair");
    place.ok("apply base pair -o out");
    let before = place.read("out/model-00001-of-00002.safetensors");
    for name in ["old.safetensors", "old.safetensors.index.json"] {
        fs::write(place.path("out").join(name), "{}").unwrap();
        place.fails("apply base pair -o out -f", DATA, name);
        fs::remove_file(place.path("out").join(name)).unwrap();
    }
    // An interrupted run can leave a barrier with the name of the shard index. The command reads a file of this name to recognize
    // the barrier. A pipe of this name must not block it.
    assert_eq!(place.command("mkfifo", &["out/model.safetensors.index.json"]).code, 0);
    place.fails("apply base pair -o out -f", DATA, "model.safetensors.index.json");
    fs::remove_file(place.path("out/model.safetensors.index.json")).unwrap();
    assert!(before == place.read("out/model-00001-of-00002.safetensors"));
    fs::write(place.path("out/config.json"), "theirs").unwrap();
    place.ok("apply base pair -o out -f");
    assert_eq!(place.read("out/config.json"), b"theirs");
}

/// Makes the folders `base` and `target` of two shards with an index, the files `base.safetensors` and `target.safetensors`, and
/// the pairs `shards` and `lone`.
fn sharded() -> Place {
    let place = Place::with_pair();
    let base = model();
    let target: Vec<_> = base.iter().map(|tensor| tuned(tensor, 50)).collect();
    for (name, tensors) in [("base", &base), ("target", &target)] {
        write_folder(&place.path(name), &[&tensors[..2], &tensors[2..]]);
    }
    place.ok("encode base target -o shards");
    place
}

/// Loaders differ in what they read of a folder that has a checkpoint in one file and another one in shards.
#[test]
fn stale_weights_beside_an_output_are_refused_or_go_with_it() {
    let place = sharded();
    let index = "model.safetensors.index.json";
    for stale in [
        "model.safetensors",
        "model-00001-of-00003.safetensors",
        "diffusion_pytorch_model.safetensors",
        "diffusion_pytorch_model.safetensors.index.json",
        "consolidated.safetensors",
        "consolidated.safetensors.index.json",
        "adapter_model.safetensors",
    ] {
        let others = ["config.json", "lora.safetensors", "pytorch_model.bin", "model.ema.safetensors"];
        fs::create_dir(place.path("out")).unwrap();
        for name in others.iter().chain([&stale]) {
            fs::write(place.path("out").join(name), "old").unwrap();
        }
        let error = place.fails("apply base shards -o out", DATA, stale);
        assert!(error["message"].as_str().unwrap().contains("--force"), "{error}");
        assert_eq!(fs::read_dir(place.path("out")).unwrap().count(), 5, "nothing was written beside {stale}");
        assert_eq!(place.json("apply base shards -o out -f")["removed"], json!([stale]));
        assert!(!place.path("out").join(stale).exists(), "{stale}");
        for name in ["model-00001-of-00002.safetensors", index] {
            place.assert_same(&format!("out/{name}"), &format!("target/{name}"));
        }
        for name in others {
            assert_eq!(place.read(&format!("out/{name}")), b"old");
        }
        fs::remove_dir_all(place.path("out")).unwrap();
    }
    // A link is removed, and not what it leads to. What is no file is not removed.
    fs::create_dir_all(place.path("out/consolidated.safetensors")).unwrap();
    fs::write(place.path("blob"), "old").unwrap();
    std::os::unix::fs::symlink("../blob", place.path("out/model.safetensors")).unwrap();
    place.ok("apply base shards -o out -f");
    assert!(!place.path("out/model.safetensors").exists() && place.path("blob").exists());
    assert_eq!(place.command("mkfifo", &["out/model.safetensors"]).code, 0);
    place.fails("apply base shards -o out -f", DATA, "model.safetensors");
    // A stale file that is an input stays.
    fs::remove_file(place.path("out/model.safetensors")).unwrap();
    fs::copy(place.path("base.safetensors"), place.path("out/model.safetensors")).unwrap();
    place.ok("encode base.safetensors target -o to-shards");
    place.fails("apply out/model.safetensors to-shards -o out -f", USAGE, "input");
}

#[test]
fn stale_shards_beside_a_file_are_refused_or_go_with_it() {
    let place = sharded();
    for name in ["model", "diffusion_pytorch_model", "weights"] {
        for stale in [format!("{name}.safetensors.index.json"), format!("{name}-00001-of-00002.safetensors")] {
            fs::create_dir(place.path("out")).unwrap();
            fs::write(place.path("out").join(&stale), "old").unwrap();
            fs::write(place.path("out/other.safetensors"), "other").unwrap();
            place.fails(&format!("apply base.safetensors pair -o out/{name}.safetensors"), DATA, &stale);
            place.ok(&format!("apply base.safetensors pair -o out/{name}.safetensors -f"));
            place.assert_same(&format!("out/{name}.safetensors"), "target.safetensors");
            let mut left: Vec<_> =
                fs::read_dir(place.path("out")).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
            left.sort();
            let mut expected = vec![format!("{name}.safetensors"), "other.safetensors".to_owned()];
            expected.sort();
            assert_eq!(left, expected, "{name} is there");
            fs::remove_dir_all(place.path("out")).unwrap();
        }
    }
}

/// A program reads a variant only if it is asked for, and an adapter beside the weights of a model.
#[test]
fn an_adapter_or_a_variant_replaces_no_other_weights() {
    let place = sharded();
    let others = [
        "model.safetensors",
        "model.ema.safetensors",
        "model.fp16-00001-of-00002.safetensors",
        "diffusion_pytorch_model.safetensors",
    ];
    fs::create_dir(place.path("out")).unwrap();
    for name in others {
        fs::write(place.path("out").join(name), "other").unwrap();
    }
    for (name, stale) in [
        ("adapter_model.safetensors", "adapter_model.safetensors.index.json"),
        ("model.bf16.safetensors", "model.bf16-00001-of-00002.safetensors"),
        ("model.v1.safetensors", "model.safetensors.index.v1.json"),
    ] {
        let apply = format!("apply base.safetensors pair -o out/{name} -f");
        assert_eq!(place.json(&apply)["removed"], json!([]));
        fs::write(place.path("out").join(stale), "old").unwrap();
        let run = place.ok(&apply);
        assert!(run.out.contains(&format!("what programs would have read instead: {stale}")), "{}", run.out);
        for name in others {
            assert_eq!(place.read(&format!("out/{name}")), b"other");
        }
    }
}

#[test]
fn a_page_replaces_no_input_and_nothing_but_files() {
    let place = Place::with_pair();
    place.ok("store init st");
    place.ok("store put st target.safetensors");
    let before = place.read("base.safetensors");
    fs::copy(place.path("pair.tpde-index"), place.path("index")).unwrap();
    std::os::unix::fs::symlink("base.safetensors", place.path("to-base")).unwrap();
    for page in ["base.safetensors", "to-base", "pair.tpde-index", "pair.tpde-blob"] {
        place.fails(&format!("inspect pair --base base.safetensors --html {page} -f"), USAGE, "the same as input");
    }
    place.fails("store report st --html st/store.json -f", USAGE, "is inside input");
    place.fails("store report st --html st -f", USAGE, "is the same as input");
    assert!(before == place.read("base.safetensors"));
    place.assert_same("index", "pair.tpde-index");
    place.ok("store log st");
    assert_eq!(place.command("mkfifo", &["pipe"]).code, 0);
    fs::create_dir(place.path("folder")).unwrap();
    std::os::unix::fs::symlink("/dev/stdout", place.path("to-device")).unwrap();
    for page in ["pipe", "folder", "to-device"] {
        for line in ["inspect pair", "store report st"] {
            assert_eq!(place.fails(&format!("{line} --html {page} -f"), SYSTEM, page)["kind"], "io");
        }
    }
    use std::os::unix::fs::FileTypeExt;
    assert!(fs::symlink_metadata(place.path("pipe")).unwrap().file_type().is_fifo());
}

#[test]
fn a_foreign_lock_is_waited_for_with_a_message() {
    use std::io::{BufRead, BufReader, Read};
    let place = Place::with_pair();
    for quiet in [false, true] {
        let lock = fs::File::open(place.0.path()).unwrap();
        lock.lock().unwrap();
        let begin = std::time::Instant::now();
        let mut command = std::process::Command::new(TPDE);
        let line = "encode base.safetensors target.safetensors -o other -f";
        command.args(line.split_whitespace()).args(quiet.then_some("-q")).current_dir(place.0.path());
        let mut child = command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::piped()).spawn().unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        if !quiet {
            let mut message = String::new();
            stderr.read_line(&mut message).unwrap();
            assert!(message.contains("is locked by another process, waiting for up to 30 s"), "{message}");
            // A short wait is silent; a long one is reported once.
            assert!(begin.elapsed() >= std::time::Duration::from_secs(1));
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
        lock.unlock().unwrap();
        assert!(child.wait().unwrap().success());
        let mut rest = String::new();
        stderr.read_to_string(&mut rest).unwrap();
        assert_eq!(rest, "");
    }
}

#[test]
fn names_may_be_as_long_as_the_file_system_allows() {
    let place = Place::with_pair();
    let stem = "n".repeat(255 - ".tpde-index".len());
    place.ok(&format!("encode base.safetensors target.safetensors -o {stem}"));
    place.ok(&format!("apply base.safetensors {stem} -o {}", "o".repeat(255)));
    place.assert_same(&"o".repeat(255), "target.safetensors");
    // A name longer by one character is refused before any work.
    place.fails(&format!("encode base.safetensors target.safetensors -o {stem}n"), SYSTEM, "File name too long");
}

#[test]
fn outputs_that_name_no_file_are_refused_before_the_work() {
    let place = Place::with_pair();
    fs::create_dir(place.path("folder")).unwrap();
    let before = place.names();
    for output in ["folder/", "new/", ".", "..", "folder/..", "folder/."] {
        place.fails(&format!("encode base.safetensors target.safetensors -o {output}"), USAGE, "names no pair");
        place.fails(&format!("inspect {output}"), USAGE, "names no pair");
        for only in ["", "--tensor step"] {
            place.fails(&format!("apply base.safetensors pair -o {output} {only}"), USAGE, "must name a file");
        }
    }
    place.fails("apply base.safetensors pair -o folder", USAGE, "folder/model.safetensors");
    for words in [["inspect", ""], ["verify", ""]] {
        let run = place.command(TPDE, &words);
        assert_eq!(run.code, USAGE, "{}", run.err);
    }
    assert_eq!(place.names(), before);

    // A pair of shards is rebuilt as a folder.
    write_folder(&place.path("shards"), &[&model()]);
    place.ok("encode --no-base shards -o anchor");
    place.ok("apply --no-base anchor -o rebuilt/");
    place.assert_same("rebuilt/model-00001-of-00001.safetensors", "shards/model-00001-of-00001.safetensors");
}

#[test]
fn a_signal_that_is_ignored_stays_ignored() {
    let place = Place::with_pair();
    let line = "encode base.safetensors target.safetensors -o other";
    // The process that runs the tests may ignore the signal, and its children inherit that.
    for (trap, reset, is_ignored) in [("trap '' HUP", "", true), ("true", "env --default-signal", false)] {
        let script = format!(
            "{trap}; exec {reset} strace -f -qq -o log -e trace=?link,?linkat -e inject=?link,?linkat:signal=HUP:when=1 {TPDE} {line} -f"
        );
        let mut command = std::process::Command::new("sh");
        let output = match command.args(["-c", &script]).current_dir(place.0.path()).output() {
            Ok(output) if place.path("log").exists() => output,
            _ => return assert_ne!(std::env::var("TPDE_NO_SKIP").as_deref(), Ok("1"), "strace is not there"),
        };
        assert_eq!(output.status.success(), is_ignored, "{output:?}");
    }
}

#[test]
fn a_full_disk_leaves_nothing_behind() {
    let place = Place::with_pair();
    let before = place.names();
    // Files cannot grow beyond 4 KiB, as on a full disk. The write also raises a signal, which may be ignored.
    for line in ["encode --no-base target.safetensors -o full", "apply base.safetensors pair -o full.safetensors"] {
        for trap in ["trap '' XFSZ", "true"] {
            let script = format!("{trap}; ulimit -f 8; exec env {TPDE} {line}");
            let run = place.command("sh", &["-c", &script]);
            assert_eq!(run.code, SYSTEM, "{trap}: {}", run.err);
            assert!(run.err.contains("cannot write"), "{}", run.err);
            assert_eq!(place.names(), before);
        }
    }
}
