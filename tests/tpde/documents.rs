//! The documents: their links, and the code in them.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Paths and texts of the repository's documents.
fn documents() -> Vec<(PathBuf, String)> {
    let folders = ["", "docs", "docs/decisions", "spec", "python", "kernels", "kernels/emulator", "benches/record", "testdata"];
    let mut documents = Vec::new();
    for folder in folders {
        for entry in fs::read_dir(root().join(folder)).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "md") {
                let text = fs::read_to_string(&path).unwrap();
                documents.push((path, text));
            }
        }
    }
    assert!(documents.len() > folders.len(), "{documents:?}");
    documents
}

/// The lines outside fenced code.
fn prose(text: &str) -> impl Iterator<Item = &str> {
    let mut code = false;
    text.lines().filter(move |line| {
        let fence = line.trim_start().starts_with("```");
        code ^= fence;
        !code && !fence
    })
}

/// Anchors of a document's headings, formed as on GitHub.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = prose(text).filter(|line| line.starts_with('#'));
    let anchor = |heading: &str| {
        let kept = heading.trim_start_matches('#').trim().chars().filter(|&c| c.is_alphanumeric() || " -_".contains(c));
        kept.map(|c| if c == ' ' { '-' } else { c.to_ascii_lowercase() }).collect()
    };
    headings.map(anchor).collect()
}

/// The targets of the links `[…](target)` in a text.
fn links(text: &str) -> Vec<&str> {
    let after = |line| str::split(line, "](").skip(1).filter_map(|rest| Some(rest.split_once(')')?.0));
    prose(text).flat_map(after).collect()
}

#[test]
fn links_between_documents_lead_to_files_and_headings() {
    let (mut checked, mut wrong) = (0, Vec::new());
    for (path, text) in documents() {
        for link in links(&text).into_iter().filter(|link| !link.contains("://")) {
            let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target = if file.is_empty() { path.clone() } else { path.parent().unwrap().join(file) };
            let leads = target.exists() && (anchor.is_empty() || anchors(&fs::read_to_string(&target).unwrap()).contains(anchor));
            checked += 1;
            if !leads {
                wrong.push(format!("{}: {link}", path.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(checked > 30, "{checked} links");
}

#[test]
fn rust_code_in_documents_is_compiled() {
    let crates = ["src/lib.rs", "cuda/src/lib.rs"].map(|path| fs::read_to_string(root().join(path)).unwrap());
    let mut found = 0;
    for (path, text) in documents().into_iter().filter(|(_, text)| text.contains("```rust")) {
        let include = format!("../{}\")", path.strip_prefix(root()).unwrap().display());
        assert!(crates.iter().any(|text| text.contains(&include)), "no crate includes {include}");
        assert_eq!(text.matches("```").count() % 2, 0, "{}", path.display());
        found += 1;
    }
    assert_eq!(found, 3, "README.md, docs/rust.md and docs/cuda.md");
}

#[test]
fn the_readme_stays_short() {
    let words = fs::read_to_string(root().join("README.md")).unwrap().split_whitespace().count();
    assert!(words <= 1200, "{words} words: move details to docs/");
}
