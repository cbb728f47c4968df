//! `tpde inspect --html`.

use crate::common::place::*;
use crate::common::*;
use std::fs;

/// The drawings of a page, and the number of their rectangles.
fn drawings(page: &str) -> Vec<(String, usize)> {
    let svg = |rest: &str| {
        let text = format!("<svg{}</svg>", rest.split_once("</svg>").expect("a drawing ends").0);
        let drawing = roxmltree::Document::parse(&text).unwrap_or_else(|e| panic!("{e} in {text}"));
        let root = drawing.root_element();
        let rectangles = drawing.descendants().filter(|node| node.has_tag_name("rect")).count();
        match (root.attribute("aria-labelledby"), root.attribute("aria-hidden")) {
            (Some(id), None) => {
                assert_eq!(root.attribute("role"), Some("img"));
                assert_eq!(page.matches(&format!("id=\"{id}\"")).count(), 1, "{id}");
                (id.to_owned(), rectangles)
            }
            (None, Some("true")) => (String::new(), rectangles),
            other => panic!("a drawing without a label: {other:?}"),
        }
    };
    page.split("<svg").skip(1).map(svg).filter(|(id, _)| !id.is_empty()).collect()
}

pub fn names(page: &str) -> Vec<String> {
    drawings(page).into_iter().map(|(id, _)| id).collect()
}

#[test]
fn a_page_draws_what_a_pair_holds() {
    let place = Place::with_pair();
    place.ok("inspect pair --html page.html");
    let page = fs::read_to_string(place.path("page.html")).unwrap();
    assert_eq!(names(&page), ["changed", "bits", "stored", "chunks"]);
    let report = place.json("inspect pair");
    let chunks = report["summary"]["chunks"].as_u64().unwrap() as usize;
    assert_eq!(drawings(&page).into_iter().find(|(id, _)| id == "chunks").unwrap().1, chunks);
    assert!(page.contains(report["summary"]["pair_digest"].as_str().unwrap()));
    let root = &report["summary"]["base_root"].as_str().unwrap()[..8];
    let title = heading(&page);
    assert!(
        title.starts_with(&format!("pair: base {root} → target ")) && title.ends_with(&date(&place, "pair.tpde-index")),
        "{title}"
    );
    assert!(page.contains(">layer</text>"));
    for word in ["<script", "http://", "https://", "src=", "url("] {
        assert!(!page.contains(word), "{word}");
    }

    // It is not replaced, unless --force is given. With a base, it shows how far lanes move.
    let error = place.fails("inspect pair --html page.html --base base.safetensors", SYSTEM, "exists");
    assert!(error["hint"].as_str().unwrap().contains("--force"));
    assert!(fs::read_to_string(place.path("page.html")).unwrap() == page);
    place.ok("inspect pair --html page.html --base base.safetensors --force");
    let page = fs::read_to_string(place.path("page.html")).unwrap();
    assert_eq!(names(&page), ["changed", "bits", "stored", "moves", "chunks"]);
    assert!(page.contains("up by 1 step: ") && page.contains("down by 1 step: ") && page.contains(">steps from base to target"));
    assert!(heading(&page).starts_with("pair: base.safetensors → "), "{}", heading(&page));
    assert_eq!(page.matches(&heading(&page)).count(), 2, "the title of the document is the heading");
}

fn heading(page: &str) -> String {
    page.split_once("<h1>").unwrap().1.split_once("</h1>").unwrap().0.to_owned()
}

/// When a file was written, as text.
fn date(place: &Place, name: &str) -> String {
    let written = fs::metadata(place.path(name)).unwrap().modified().unwrap();
    format!("{} UTC", humantime::format_rfc3339_seconds(written).to_string()[..16].replace('T', " "))
}

#[test]
fn a_few_bytes_do_not_set_the_scale() {
    let place = Place::new();
    // One change of the small tensor takes a whole payload.
    let shapes: [(&str, &[usize]); 3] = [("layers.0.w", &[400, 300]), ("layers.1.w", &[400, 300]), ("layers.0.scale", &[8])];
    let tensors: Vec<_> = shapes.iter().zip(1..).map(|((name, shape), seed)| tensor(name, "BF16", shape, seed)).collect();
    write_file(&place.path("base.safetensors"), &tensors);
    write_file(&place.path("target.safetensors"), &tensors.iter().map(|one| tuned(one, 8)).collect::<Vec<_>>());
    place.ok("encode base.safetensors target.safetensors -o pair");
    place.ok("inspect pair --html page.html");
    let page = fs::read_to_string(place.path("page.html")).unwrap();
    assert!(page.contains(" bits or more"), "the small tensor is beyond the scale");
}

#[test]
fn names_from_a_pair_are_text() {
    let place = Place::new();
    let names = ["layers.0.<script>alert(1)</script>", "layers.1.\"onload=x", "a&amp;b'\u{1}\u{202e}", "0.1.2"];
    let tensors: Vec<_> = names.iter().zip(0..).map(|(name, seed)| tensor(name, "BF16", &[40, 30], seed)).collect();
    write_file(&place.path("base.safetensors"), &tensors);
    write_file(&place.path("target.safetensors"), &tensors.iter().map(|t| tuned(t, 7)).collect::<Vec<_>>());
    place.ok("encode base.safetensors target.safetensors -o pair");
    place.ok("inspect pair --html page.html --base base.safetensors");
    let page = fs::read_to_string(place.path("page.html")).unwrap();
    assert_eq!(drawings(&page).len(), 5);
    assert!(!page.contains("<script") && page.contains("layers.*.&lt;script&gt;alert(1)&lt;/script&gt;"));
    assert!(page.contains("layers.*.&quot;onload=x") && page.contains("a&amp;amp;b"));
    assert!(!page.contains(['\u{1}', '\u{202e}']));
}

#[test]
fn long_names_are_cut_in_tables() {
    let place = Place::new();
    let name = format!("layers.0.{}", "n".repeat(4000));
    write_file(&place.path("base.safetensors"), &[tensor(&name, "BF16", &[40, 30], 1)]);
    place.ok("encode --no-base base.safetensors -o pair");
    place.ok("inspect pair --html page.html");
    let page = fs::read_to_string(place.path("page.html")).unwrap();
    let cells = page.split("<td").skip(1).map(|cell| cell.split_once('>').unwrap().1.split_once("</td>").unwrap().0);
    assert!(
        cells.clone().count() > 1 && cells.clone().all(|cell| cell.chars().count() <= 80),
        "{:?}",
        cells.max_by_key(|cell| cell.len())
    );
    assert!(page.contains("<td title=\"layers.*.nnnn"), "more of the name is in the title");
}

#[test]
fn a_page_that_cannot_be_written_leaves_nothing() {
    let place = Place::with_pair();
    let before = fs::read_dir(place.path(".")).unwrap().count();
    place.fails("inspect pair --html missing/page.html", SYSTEM, "missing");
    place.fails("inspect pair --html page.html --base target.safetensors", DATA, "chunk.base_sum");
    place.fails("inspect pair --html page.html --explain", USAGE, "--explain");
    place.fails("inspect pair --base base.safetensors", USAGE, "--explain");
    assert_eq!(fs::read_dir(place.path(".")).unwrap().count(), before);
}
