//! Formats values for people and for programs.

use clap::builder::styling::{AnsiColor, Style};
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use std::fmt;
use std::io::{self, Write};
use std::ops::Deref;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use tpde::{Escaped, PayloadDigests};
use unicode_width::UnicodeWidthStr;

pub const BOLD: Style = Style::new().bold();
pub const GOOD: Style = AnsiColor::Green.on_default().bold();
pub const BAD: Style = AnsiColor::Red.on_default().bold();
pub const HINT: Style = AnsiColor::Cyan.on_default().bold();

/// A path, safe to print.
pub fn path(path: &Path) -> String {
    Escaped(&path.display().to_string()).to_string()
}

/// A path in a report. In JSON it is a string. A path that is not UTF-8 is an object instead: `shown` is the path as printed, and
/// `bytes` are its bytes in hexadecimal.
#[derive(Debug)]
pub struct JsonPath(pub PathBuf);

impl Serialize for JsonPath {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if let Some(path) = self.0.to_str() {
            return serializer.serialize_str(path);
        }
        let bytes: String = self.0.as_os_str().as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
        let mut object = serializer.serialize_map(Some(2))?;
        object.serialize_entry("shown", &path(&self.0))?;
        object.serialize_entry("bytes", &bytes)?;
        object.end()
    }
}

impl Deref for JsonPath {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.0
    }
}

/// Describes which payloads were compared with digests.
pub fn payload_digests(compared: PayloadDigests) -> &'static str {
    match compared {
        PayloadDigests::All => "all have the digest that the pair digest covers",
        PayloadDigests::EachRead => "those that were read have the digests that the pair digest covers",
        _ => "digests not compared",
    }
}

/// A size in bytes: `45.4 MB`.
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["kB", "MB", "GB", "TB", "PB"];
    if n < 1000 {
        return format!("{n} B");
    }
    let mut value = n as f64 / 1e3;
    let mut unit = 0;
    // From 999.95 on, the value would be rounded to 1000.0.
    while value >= 999.95 && unit + 1 < UNITS.len() {
        value /= 1e3;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

/// A number with separated thousands: `22,713,216`.
pub fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// A number and a noun: `1 tensor`, `2 tensors`.
pub fn counted(n: u64, thing: &str) -> String {
    format!("{} {thing}{}", count(n), if n == 1 { "" } else { "s" })
}

/// A share in per cent. Shows 0 only for none and 100 only for all.
pub fn share(part: u64, whole: u64) -> String {
    let percent = part as f64 * 100.0 / whole.max(1) as f64;
    match percent {
        _ if part == 0 => "0 %".into(),
        _ if part == whole => "100 %".into(),
        ..0.01 => "<0.01 %".into(),
        99.99.. => ">99.99 %".into(),
        _ => format!("{percent:.2} %"),
    }
}

/// The size of a pair, beside that of its target.
pub fn pair_size(target: u64, index: u64, blob: u64) -> String {
    let (stored, target, index, blob) = (bytes(index + blob), bytes(target), bytes(index), bytes(blob));
    format!("{stored} for {target} of tensors: index {index}, blob {blob}")
}

/// Compression ratio; `None` if nothing is stored.
pub fn ratio(bytes: u64, stored: u64) -> Option<f64> {
    (stored > 0).then(|| bytes as f64 / stored as f64)
}

/// A ratio with about three digits: `46.8x`.
pub fn times(ratio: Option<f64>) -> String {
    match ratio {
        None => "–".into(),
        Some(r) if r < 9.995 => format!("{r:.2}x"),
        Some(r) if r < 999.95 => format!("{r:.1}x"),
        Some(r) => format!("{}x", count(r.round() as u64)),
    }
}

/// Speed in units of 10⁹ bytes per second.
pub fn speed(bytes: u64, seconds: f64) -> f64 {
    bytes as f64 / seconds.max(1e-9) / 1e9
}

/// How fast work was: `1.20 GB/s, 38 ms on 2 threads`.
pub fn speed_fact(gb_per_second: f64, seconds: f64, threads: usize) -> String {
    format!("{gb_per_second:.2} GB/s, {} on {}", duration(seconds), counted(threads as u64, "thread"))
}

/// A duration: `38 ms`, `4.12 s`.
pub fn duration(seconds: f64) -> String {
    if seconds < 1.0 { format!("{:.0} ms", seconds * 1e3) } else { format!("{seconds:.2} s") }
}

/// A time in seconds since 1970 as date and minute, in UTC: `2026-11-28 09:30`. Times that are not in years of four digits are `–`.
#[cfg(any(feature = "html", feature = "store"))]
pub fn date(seconds: u64) -> String {
    use std::time::{Duration, SystemTime};
    const LAST: u64 = 253_402_300_799;
    let time = (seconds <= LAST).then(|| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds));
    let text = time.map(|time| humantime::format_rfc3339_seconds(time).to_string());
    text.and_then(|text| Some(text.get(..16)?.replace('T', " "))).unwrap_or_else(|| "–".into())
}

/// The first few names, escaped because they come from files, and the number of the others: `a, b, c and 7 more`.
pub fn some(names: &[String]) -> String {
    const SHOWN: usize = 3;
    let mut out = names.iter().take(SHOWN).map(|name| Escaped(name).to_string()).collect::<Vec<_>>().join(", ");
    if names.len() > SHOWN {
        out += &format!(" and {} more", count((names.len() - SHOWN) as u64));
    }
    out
}

/// A command that copies files of a checkpoint's folder, except other weights. `None` if there are none, or their names are not for a
/// terminal.
pub fn copy(checkpoint: &Path, names: &[String], to: &str) -> Option<String> {
    let folder = if checkpoint.is_dir() { checkpoint } else { checkpoint.parent()? };
    let is_of_weights = |name: &&String| {
        name.contains(".safetensors") || [".bin", ".bin.index.json", ".gguf", ".pt", ".pth"].iter().any(|end| name.ends_with(end))
    };
    let quoted = names
        .iter()
        .filter(|name| !is_of_weights(name))
        .map(|name| quoted(folder.join(name).to_str()?))
        .collect::<Option<Vec<_>>>()?;
    (!quoted.is_empty()).then(|| format!("cp {} {to}", quoted.join(" ")))
}

/// An argument for a shell.
pub fn quoted(argument: &str) -> Option<String> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./+:@%,=".contains(c);
    match argument {
        _ if argument.chars().any(|c| c.is_control()) || Escaped(argument).to_string() != argument => None,
        _ if argument.starts_with('-') => quoted(&format!("./{argument}")),
        _ if argument.chars().all(is_plain) => Some(argument.to_owned()),
        _ => Some(format!("'{}'", argument.replace('\'', r"'\''"))),
    }
}

/// Writes one line per fact: its label, then its text.
pub fn facts(f: &mut fmt::Formatter<'_>, facts: &[(&str, String)]) -> fmt::Result {
    let width = facts.iter().map(|(label, _)| label.len()).max().unwrap_or(0);
    facts.iter().try_for_each(|(label, fact)| writeln!(f, "  {label:width$}  {fact}"))
}

/// Writes a table with a bold header: `left` columns of text, then columns of numbers. If the terminal is too narrow, the first
/// column is cut on the left, so that each row stays on one line.
///
/// `rows` is iterated twice, once for the widths of the columns and once for the text. Rows are never stored.
pub fn table(
    f: &mut fmt::Formatter<'_>,
    left: usize,
    header: &[&str],
    rows: impl Iterator<Item = Vec<String>> + Clone,
) -> fmt::Result {
    const INDENT: usize = 2;
    const LEAST: usize = 16;
    let mut widths: Vec<_> = header.iter().map(|cell| cell.width()).collect();
    for row in rows.clone() {
        widths.iter_mut().zip(&row).for_each(|(width, cell)| *width = (*width).max(cell.width()));
    }
    if let Some((terminal, _)) = terminal_size::terminal_size_of(std::io::stdout()) {
        let others: usize = widths[1..].iter().map(|width| width + INDENT).sum();
        let room = usize::from(terminal.0).saturating_sub(others + INDENT).max(LEAST);
        widths[0] = widths[0].min(room);
    }
    let mut line = |style: Style, row: Vec<String>| {
        let mut text = String::new();
        for (i, (cell, &width)) in row.iter().zip(&widths).enumerate() {
            let cell = if i == 0 { cut(cell, width) } else { cell.clone() };
            let (indent, space) = (" ".repeat(INDENT), " ".repeat(width.saturating_sub(cell.width())));
            let parts = if i < left { [indent, cell, space] } else { [indent, space, cell] };
            text.extend(parts);
        }
        writeln!(f, "{style}{}{style:#}", text.trim_end())
    };
    line(BOLD, header.iter().map(|&cell| cell.to_owned()).collect())?;
    rows.into_iter().try_for_each(|row| line(Style::new(), row))
}

/// The end of `text`, of at most `room` characters. The end is kept because names differ there.
fn cut(text: &str, room: usize) -> String {
    match text.chars().count() {
        count if count <= room => text.to_owned(),
        count => ['…'].into_iter().chain(text.chars().skip(count + 1 - room)).collect(),
    }
}

/// The beginning of `text`, of at most `room` characters.
#[cfg(feature = "store")]
pub fn begin(text: &str, room: usize) -> String {
    match text.chars().count() {
        count if count <= room => text.to_owned(),
        _ => text.chars().take(room - 1).chain(['…']).collect(),
    }
}

/// Writes one JSON object: the schema, then the fields of `report`. The output is ASCII, so that no name can control a terminal.
pub fn json(out: impl Write, schema: &str, report: &impl Serialize) -> io::Result<()> {
    #[derive(Serialize)]
    struct Document<'a, R> {
        schema: &'a str,
        #[serde(flatten)]
        report: &'a R,
    }
    let mut serializer = serde_json::Serializer::with_formatter(out, Ascii);
    Document { schema, report }.serialize(&mut serializer)?;
    serializer.into_inner().write_all(b"\n")
}

/// Compact JSON in which everything but printable ASCII is escaped. Only strings need this: JSON is ASCII outside of strings, and
/// the serializer escapes control characters below 0x20 itself.
struct Ascii;

impl serde_json::ser::Formatter for Ascii {
    fn write_string_fragment<W: ?Sized + Write>(&mut self, writer: &mut W, fragment: &str) -> io::Result<()> {
        let is_plain = |c: char| matches!(c, ' '..='~');
        let mut rest = fragment;
        while let Some(at) = rest.find(|c| !is_plain(c)) {
            let (plain, from) = rest.split_at(at);
            writer.write_all(plain.as_bytes())?;
            let end = from.find(is_plain).unwrap_or(from.len());
            from[..end].encode_utf16().try_for_each(|unit| write!(writer, "\\u{unit:04x}"))?;
            rest = &from[end..];
        }
        writer.write_all(rest.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        assert_eq!([bytes(999), bytes(999_949), bytes(999_950), bytes(45_437_832)], ["999 B", "999.9 kB", "1.0 MB", "45.4 MB"]);
        assert_eq!([count(0), count(999), count(1000), count(22_713_216)], ["0", "999", "1,000", "22,713,216"]);
        assert_eq!(
            [share(0, 9), share(9, 9), share(1, 1 << 40), share((1 << 40) - 1, 1 << 40)],
            ["0 %", "100 %", "<0.01 %", ">99.99 %"]
        );
        assert_eq!([times(None), times(Some(9.999)), times(Some(46.84)), times(Some(1234.5))], ["–", "10.0x", "46.8x", "1,235x"]);
    }

    #[test]
    fn long_names_keep_their_endings() {
        assert_eq!([cut("abcdef", 6), cut("abcdef", 5)], ["abcdef", "…cdef"]);
    }

    #[test]
    fn json_is_ascii_and_means_the_same() {
        #[derive(Serialize)]
        struct Report {
            name: &'static str,
        }
        let name = "a\u{1b}\u{7f}\u{9b}\u{202e}é😀\"";
        let mut text = Vec::new();
        json(&mut text, "tpde.test/1", &Report { name }).unwrap();
        let text = String::from_utf8(text).unwrap();
        assert!(text.trim_end().bytes().all(|b| (b' '..=b'~').contains(&b)), "{text}");
        let back: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(back["name"], name);
        assert_eq!(back["schema"], "tpde.test/1");
    }
}
