//! What pages have in common: the document around them, numbers and scales.

use maud::{DOCTYPE, Markup, PreEscaped, html};

/// A label and its text.
pub type Fact = (&'static str, String);

/// Width of the drawings, in SVG units.
pub const WIDTH: f64 = 960.0;

/// A page with a title, facts below it, and drawings.
pub fn document(title: &str, facts: &[Fact], drawings: &Markup) -> String {
    let markup = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                // Names in a pair or a store are untrusted. This policy keeps the browser from loading or running anything.
                meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:";
                link rel="icon" href="data:,";
                title { (title) " – TPDE" }
                style { (PreEscaped(include_str!("style.css"))) }
            }
            body {
                main {
                    h1 { (title) }
                    dl { @for (label, text) in facts { dt { (label) } dd { (text) } } }
                    (drawings)
                }
            }
        }
    };
    markup.into_string()
}

/// A name of at most `most` characters. The end of a name tells more than its begin.
pub fn shortened(name: &str, most: usize) -> String {
    let count = name.chars().count();
    if count <= most { name.to_owned() } else { format!("…{}", name.chars().skip(count + 1 - most).collect::<String>()) }
}

/// A cell of a table with a text from a pair or a store, which may be long. Cells do not wrap, so the text is cut; a browser shows
/// all of it beside the pointer.
pub fn cell(text: &str) -> Markup {
    const MOST: usize = 80;
    let is_cut = text.chars().count() > MOST;
    html! { td title=[is_cut.then_some(text)] { (shortened(text, MOST)) } }
}

/// A number with three digits.
pub fn number(x: f64) -> String {
    let decimals = (2 - x.abs().max(1e-9).log10().floor() as i32).clamp(0, 4);
    format!("{x:.*}", decimals as usize)
}

pub fn percent(share: f64) -> String {
    format!("{} %", number(100.0 * share))
}

/// Opacity of a colour from a value between 0 and 1. The smallest values stay visible.
pub fn shade(value: f64) -> String {
    format!("{:.2}", 0.12 + 0.88 * value.clamp(0.0, 1.0))
}

/// The place of a share on a logarithmic scale from 0.01 % to 100 %.
pub fn on_log_scale(share: f64) -> f64 {
    (share.max(1e-4).log10() + 4.0) / 4.0
}

/// The end of a scale: the largest value, without those that stand for a thousandth of the weight or less. A few bytes of one small
/// tensor leave the scale to the others. Second, whether values are beyond that end.
pub fn end_of_scale(values: impl Iterator<Item = (f64, u64)>) -> (f64, bool) {
    let mut values: Vec<_> = values.filter(|(value, weight)| *value > 0.0 && *weight > 0).collect();
    values.sort_by(|a, b| b.0.total_cmp(&a.0));
    let most = values.iter().map(|(_, weight)| u128::from(*weight)).sum::<u128>() / 1000;
    let mut above = 0;
    let first = values.iter().position(|(_, weight)| {
        above += u128::from(*weight);
        above > most
    });
    let end = first.map_or(1.0, |at| values[at].0);
    (end, values.first().is_some_and(|(value, _)| *value > end))
}

/// The label of the end of a scale of bits.
pub fn bits_or_more((end, has_more): (f64, bool)) -> String {
    format!("{} bits{}", number(end), if has_more { " or more" } else { "" })
}

/// The scale of a colour.
pub fn legend(from: &str, to: &str) -> Markup {
    html! {
        div.legend {
            (from)
            svg viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true" {
                @for i in 0..10u32 { rect.value x=(10 * i) y="0" width="10" height="10" fill-opacity=(shade(f64::from(i) / 9.0)) {} }
            }
            (to)
        }
    }
}
