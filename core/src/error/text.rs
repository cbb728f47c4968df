//! Untrusted texts in messages: escaped, and of bounded length.

use crate::prelude::*;
use core::fmt;

/// Maximum number of characters of a name, a path or a shape in a message or a table.
pub const SHOWN_CHARS: usize = 200;
/// Maximum number of characters of a free text in a message.
pub const MESSAGE_CHARS: usize = 1000;

/// Displays an untrusted name so that it is safe for a terminal or a log. Control characters, bidirectional overrides and other
/// invisible characters are shown as `\u{…}`. A name longer than [`SHOWN_CHARS`] loses its middle.
pub struct Escaped<'a>(pub &'a str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&escape(self.0, SHOWN_CHARS))
    }
}

/// Displays a free text, escaped like a name and cut to [`MESSAGE_CHARS`].
pub(super) struct Text<'a>(pub &'a str);

impl fmt::Display for Text<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&escape(self.0, MESSAGE_CHARS))
    }
}

fn is_invisible(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff0}'..='\u{fffb}' | '\u{e0000}'..='\u{e0fff}')
}

/// Number of characters with which `c` is shown.
fn shown_width(c: char) -> usize {
    if is_invisible(c) { c.escape_unicode().count() } else { 1 }
}

fn push_shown(out: &mut String, c: char) {
    if is_invisible(c) { out.extend(c.escape_unicode()) } else { out.push(c) }
}

/// `text` with invisible characters escaped. If that has more than `limit` characters, the middle is replaced by an ellipsis.
fn escape(text: &str, limit: usize) -> String {
    // Size, in bytes, of the longest prefix that is shown with at most `limit` characters.
    let fitting = |chars: &mut dyn Iterator<Item = char>, limit: usize| {
        let mut used = 0;
        let fits = |c: &char| {
            used += shown_width(*c);
            used <= limit
        };
        chars.take_while(fits).map(char::len_utf8).sum::<usize>()
    };
    let mut out = String::new();
    if fitting(&mut text.chars(), limit) == text.len() {
        text.chars().for_each(|c| push_shown(&mut out, c));
    } else {
        let end = limit / 2;
        text[..fitting(&mut text.chars(), limit - 1 - end)].chars().for_each(|c| push_shown(&mut out, c));
        out.push('…');
        text[text.len() - fitting(&mut text.chars().rev(), end)..].chars().for_each(|c| push_shown(&mut out, c));
    }
    out
}

/// The text of `value`, with invisible characters escaped, cut to [`MESSAGE_CHARS`]. Formatting stops at that limit, so the cost
/// is bounded even if the value is huge.
pub(super) fn bounded(value: impl fmt::Display) -> String {
    struct BoundedText {
        text: String,
        left: usize,
    }
    impl fmt::Write for BoundedText {
        fn write_str(&mut self, text: &str) -> fmt::Result {
            for c in text.chars() {
                // The last character is reserved for the ellipsis.
                match self.left.checked_sub(shown_width(c)) {
                    Some(left) if left > 0 => self.left = left,
                    _ => {
                        self.text.push('…');
                        return Err(fmt::Error);
                    }
                }
                push_shown(&mut self.text, c);
            }
            Ok(())
        }
    }
    let mut out = BoundedText { text: String::new(), left: MESSAGE_CHARS };
    let _ = fmt::write(&mut out, format_args!("{value}"));
    out.text
}

/// `bytes` in lower-case hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    bytes.iter().flat_map(|b| [b >> 4, b & 15].map(|digit| char::from(DIGITS[usize::from(digit)]))).collect()
}

/// Displays the values of a list, separated by commas.
pub struct List<'a, T>(pub &'a [T]);

impl<T: fmt::Display> fmt::Display for List<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, value) in self.0.iter().enumerate() {
            write!(f, "{}{value}", if i > 0 { ", " } else { "" })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_strangers_cannot_drive_a_terminal() {
        let shown = Escaped("a\x1b[31m\n\u{202e}b\u{9b}é").to_string();
        assert_eq!(shown, "a\\u{1b}[31m\\u{a}\\u{202e}b\\u{9b}é");
    }

    #[test]
    fn long_names_are_cut_in_the_middle() {
        let shown = |text: &str| Escaped(text).to_string();
        assert_eq!(shown(&"x".repeat(200)), "x".repeat(200));
        let long = format!("{}{}", "a".repeat(150), "z".repeat(51));
        assert_eq!(shown(&long), format!("{}…{}", "a".repeat(99), &long[101..]));
        let invisible = shown(&"\u{e0001}".repeat(1 << 20));
        assert!(invisible.chars().count() <= SHOWN_CHARS && invisible.contains("}…\\u{e0001}"), "{invisible}");
    }
}
