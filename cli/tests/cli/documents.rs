//! The commands in the documents: they run in order, in a folder with small checkpoints under the names that the documents use.

use crate::common::place::*;
use crate::common::*;
use std::collections::BTreeSet;
use std::fs;

/// Beginnings of commands that this test does not run, and the reason.
const NOT_RUN: &[(&str, &str)] = &[
    ("pip install ./python", "python/test installs the package"),
    ("cargo install --locked --path cli", "builds the program again"),
    ("scripts/test", "runs this test"),
    ("scripts/gpu-bench ", "needs a CUDA device"),
    ("python3 -m pip download ", "reaches PyPI"),
    ("minisign ", "needs a key and a passphrase"),
    ("python3 -m venv ", "builds wheels for a release"),
    ("target/venv-wheels/bin/pip install ", "builds wheels for a release"),
    ("rustup target add ", "builds wheels and programs for a release"),
    ("export PATH=", "builds wheels for a release"),
    ("for arch in ", "builds wheels for a release"),
    ("auditwheel show ", "builds wheels for a release"),
    ("CC_x86_64_unknown_linux_musl=", "builds a program for a release"),
];

/// A command of a document.
struct Command {
    line: usize,
    text: String,
    /// The output that the document shows; empty if it shows none.
    shown: Vec<String>,
}

/// Paths, relative to the root, and texts of the documents whose commands are run.
fn documents() -> Vec<(String, String)> {
    let docs = fs::read_dir(root().join("docs")).unwrap().map(|entry| format!("docs/{}", entry.unwrap().file_name().display()));
    let mut paths: Vec<_> = docs.filter(|path| path.ends_with(".md")).collect();
    paths.extend(["README.md", "cli/README.md", "python/README.md", "benches/record/README.md"].map(String::from));
    paths.retain(|path| root().join(path).exists());
    paths.sort();
    paths.into_iter().map(|path| (path.clone(), fs::read_to_string(root().join(path)).unwrap())).collect()
}

/// The commands in the `console` and `sh` blocks of a document, in order.
fn commands(text: &str) -> Vec<Command> {
    let mut commands: Vec<Command> = Vec::new();
    let mut block = None;
    for (at, line) in text.lines().enumerate() {
        if let Some(language) = line.strip_prefix("```") {
            block = if block.is_some() { None } else { Some(language) };
            continue;
        }
        let command = match block {
            Some("console") => line.strip_prefix("$ "),
            // An indented line, and the end of a loop, belong to the command above.
            Some("sh") => (!line.starts_with(' ') && line != "done").then_some(line),
            _ => continue,
        };
        match (command, commands.last_mut()) {
            (Some(text), _) => commands.push(Command { line: at + 1, text: text.into(), shown: Vec::new() }),
            (None, Some(last)) if block == Some("console") => last.shown.push(line.into()),
            (None, Some(last)) => last.text += &format!("\n{line}"),
            (None, None) => panic!("line {}: output without a command", at + 1),
        }
    }
    commands.retain(|command| !command.text.is_empty());
    commands
}

/// The code spans of a document outside code blocks.
fn spans(text: &str) -> Vec<&str> {
    let prose = text.split("```").step_by(2);
    prose.flat_map(|prose| prose.lines().flat_map(|line| line.split('`').skip(1).step_by(2))).collect()
}

/// A line of output without its numbers, their units and the width of its columns.
fn pattern(line: &str) -> String {
    let mut words: Vec<String> = Vec::new();
    for word in line.split_whitespace() {
        let is_digest = word.len() == 64 && word.bytes().all(|byte| byte.is_ascii_hexdigit());
        let is_unit = matches!(word.trim_end_matches([',', ':']), "B" | "kB" | "MB" | "GB");
        if is_unit && let Some(number) = words.last_mut().filter(|last| *last == "#") {
            *number += word.trim_start_matches(|c: char| c.is_alphabetic());
            continue;
        }
        let mut text = String::new();
        for c in if is_digest { "0" } else { word }.chars() {
            let continues = text.ends_with('#') && (c.is_ascii_digit() || c == '.' || c == ',');
            if !continues {
                text.push(if c.is_ascii_digit() { '#' } else { c });
            }
        }
        words.push(text);
    }
    words.join(" ")
}

/// Whether an output is what a document shows. A line `…` stands for any lines.
fn is_shown(shown: &[String], output: &[String]) -> bool {
    match shown.split_first() {
        None => output.is_empty(),
        Some((first, rest)) if first == "…" => (0..=output.len()).any(|skipped| is_shown(rest, &output[skipped..])),
        Some((first, rest)) => output.first() == Some(first) && is_shown(rest, &output[1..]),
    }
}

/// A folder with the checkpoints and pairs that the documents name.
fn place() -> Place {
    let place = Place::new();
    let base = [
        tensor("embeddings.word_embeddings.weight", "BF16", &[288, 96], 1),
        tensor("encoder.layer.5.output.dense.weight", "BF16", &[256, 96], 2),
        tensor("encoder.layer.3.output.dense.weight", "BF16", &[224, 96], 3),
        tensor("model.layers.0.mlp.weight", "BF16", &[64, 64], 4),
        tensor("model.layers.0.norm.weight", "F32", &[64], 5),
        tensor("model.layers.1.mlp.weight", "BF16", &[64, 64], 6),
        tensor("model.layers.0.self_attn.q_proj.weight", "BF16", &[1024, 16], 7),
        tensor("model.layers.0.self_attn.o_proj.weight", "BF16", &[16, 1024], 8),
    ];
    let target: Vec<_> = base.iter().map(|tensor| tuned(tensor, 50)).collect();
    write_file(&place.path("base.safetensors"), &base);
    write_file(&place.path("finetune.safetensors"), &target);
    for name in ["base.safetensors", "finetune.safetensors"] {
        place.edit(name, |bytes| *bytes = with_long_header(std::mem::take(bytes)));
    }
    place.ok("encode base.safetensors finetune.safetensors -o rl20 --codec conditioned");
    let mut version = base.to_vec();
    write_file(&place.path("before.safetensors"), &version);
    for step in 1..4 {
        version = version.iter().map(|tensor| tuned(tensor, 50 + step)).collect();
        write_file(&place.path("after.safetensors"), &version);
        place.ok(&format!("encode before.safetensors after.safetensors -o step-{step}"));
        fs::rename(place.path("after.safetensors"), place.path("before.safetensors")).unwrap();
    }
    fs::remove_file(place.path("before.safetensors")).unwrap();
    // Each shard is a single file, each rank has a file of a folder.
    for (name, ranks) in [("shard-", 2), ("rank", 4)] {
        for rank in 0..ranks {
            let pair = format!("{name}{rank}");
            let share: Vec<_> = target.iter().skip(rank).step_by(ranks).cloned().collect();
            let folder = place.path("share");
            fs::create_dir(&folder).unwrap();
            write_file(&folder.join(format!("{pair}.safetensors")), &share);
            let input = if name == "shard-" { format!("share/{pair}.safetensors") } else { "share".into() };
            place.ok(&format!("encode base.safetensors {input} -o {pair} --split llama:2"));
            fs::remove_dir_all(folder).unwrap();
        }
    }
    place
}

/// Runs the commands of a document and returns what is wrong. Adds the prefixes of commands that are not run to `used`.
fn run(path: &str, text: &str, used: &mut BTreeSet<&str>) -> Vec<String> {
    let mut wrong = Vec::new();
    let place = place();
    for command in commands(text) {
        if let Some((prefix, _)) = NOT_RUN.iter().find(|(prefix, _)| command.text.starts_with(prefix)) {
            used.insert(prefix);
            continue;
        }
        let mut fault = |what: &str| wrong.push(format!("{path}, line {}: {}\n{what}", command.line, command.text));
        let line = match command.text.strip_prefix("cargo run --release -- ") {
            Some(arguments) => format!("tpde {arguments}"),
            None => command.text.clone(),
        };
        if !line.starts_with("tpde ") {
            fault("neither run nor listed in NOT_RUN");
            continue;
        }
        let program = format!("set -euo pipefail; tpde() {{ '{TPDE}' \"$@\"; }}\n{line}");
        let result = place.command("bash", &["-c", &program]);
        let patterns = |lines: &[&str]| lines.iter().map(|line| pattern(line)).collect::<Vec<_>>();
        let shown = patterns(&command.shown.iter().map(String::as_str).collect::<Vec<_>>());
        let output = patterns(&result.out.lines().collect::<Vec<_>>());
        if result.code != 0 {
            fault(&format!("exit code {}: {}", result.code, result.err));
        } else if !shown.is_empty() && !is_shown(&shown, &output) {
            fault(&format!("the output does not match:\n{}", result.out));
        }
    }
    wrong
}

#[test]
#[cfg_attr(not(has_jq), ignore = "needs jq")]
fn the_commands_of_documents_run_and_print_what_is_shown() {
    let mut used = BTreeSet::new();
    let mut count = 0;
    let mut wrong = Vec::new();
    for (path, text) in documents() {
        count += commands(&text).len();
        wrong.extend(run(&path, &text, &mut used));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let unused: Vec<_> = NOT_RUN.iter().filter(|(prefix, _)| !used.contains(prefix)).collect();
    assert!(unused.is_empty(), "no document has {unused:?}");
    assert!(count > NOT_RUN.len(), "{count} commands");
}

#[test]
fn a_wrong_command_in_a_document_is_found() {
    let console = |lines: &str| run("document", &format!("```console\n{lines}\n```\n"), &mut BTreeSet::new());
    assert!(console("$ tpde inspect rl20 --tensors | head -n 1 | cut -c 1-20\n  tensor, by bytes").is_empty());
    for (lines, found) in [
        ("$ tpde verify rl20 --bose base.safetensors", "--bose"),
        ("$ tpde verify rl20 --base finetune.safetensors | cat", "exit code 1"),
        ("$ tpde verify rl21", "exit code 3"),
        ("$ tpde inspect rl20\nrl20, TPDE 1.2\n  ratios   266.1x\n  …", "does not match"),
        ("$ tpde inspect rl20 --tensors\n…\n  102 tensors  1.23 %", "does not match"),
        ("$ cat rl20.tpde-index", "neither run nor listed"),
    ] {
        let wrong = console(lines);
        assert!(wrong.len() == 1 && wrong[0].contains(found), "{lines}: {wrong:?}");
    }
}

#[test]
fn verbs_and_options_in_the_text_of_documents_exist() {
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
    let help = |verb: &str| -> BTreeSet<String> {
        let text = place.ok(&format!("{verb} --help")).out;
        let words = text.split(|c: char| !(c.is_alphanumeric() || c == '-')).map(String::from);
        words.filter(|word| word.starts_with("--")).collect()
    };
    let of_store = ["init", "put", "get", "log", "branch create", "branch delete", "verify", "fold", "prune", "gc", "du", "watch"];
    let all = |verb: &&'static str| match *verb {
        "store" => (*verb, of_store.iter().flat_map(|verb| help(&format!("store {verb}"))).collect()),
        _ => (*verb, help(verb)),
    };
    let options: Vec<_> = verbs.iter().map(all).collect();
    // Options of features that this program may lack.
    let is_lacking = |option: &str| match option {
        "--trust" => !cfg!(feature = "nvcomp"),
        "--mmap" => !cfg!(feature = "mmap"),
        _ => false,
    };
    let (mut checked, mut wrong) = (0, Vec::new());
    for (path, text) in documents() {
        for span in spans(&text) {
            let mut words = span.split_whitespace();
            let of_verbs: Vec<_> = match words.next() {
                Some("tpde") => match words.next() {
                    Some("VERB") | None => continue,
                    Some(verb) => options.iter().filter(|(name, _)| *name == verb).collect(),
                },
                // An option alone belongs to any verb. In the page of the records it belongs to scripts.
                Some(option) if option.starts_with("--") && !path.starts_with("benches") => options.iter().collect(),
                _ => continue,
            };
            checked += 1;
            let named = span.split_whitespace().filter(|word| word.starts_with("--")).map(|word| word.split('=').next().unwrap());
            let missing: Vec<_> =
                named.filter(|&option| !is_lacking(option) && !of_verbs.iter().any(|(_, all)| all.contains(option))).collect();
            if of_verbs.is_empty() || !missing.is_empty() {
                wrong.push(format!("{path}: `{span}`"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(checked > 40, "{checked} spans");
}
