//! Names of enum values: each printed name can be parsed, and an error lists the valid names.

use serde::Serialize;
use std::fmt::{Debug, Display};
use std::str::FromStr;
use tpde::{BaseKind, Codec, CodecChoice, Dtype, Error, Favor, FileKind, Layout, UnknownName};
use tpde_core::format::Section;

fn check<T>(what: &str, all: &[T])
where
    T: Copy + Debug + Display + FromStr<Err = UnknownName> + PartialEq,
{
    let names: Vec<_> = all.iter().map(T::to_string).collect();
    for (value, name) in all.iter().zip(&names) {
        assert_eq!(name.parse().as_ref(), Ok(value));
        for other in [name.to_uppercase(), name.to_lowercase(), format!("{name} "), name[1..].to_owned()] {
            assert!(names.contains(&other) || other.parse::<T>().is_err(), "{other}");
        }
    }
    let error = "\u{202e}nothing".repeat(1000).parse::<T>().unwrap_err();
    assert_eq!((error.what, &error.allowed.iter().map(|name| name.to_string()).collect::<Vec<_>>()), (what, &names));
    let text = Error::from(error).to_string();
    assert!(text.starts_with(&format!("no {what} is named \\u{{202e}}nothing")), "{text}");
    assert!(text.ends_with(&format!(": expected {}", names.join(", "))) && text.len() < 700, "{text}");
}

fn check_json<T: Display + Serialize>(all: &[T]) {
    for value in all {
        assert_eq!(serde_json::to_value(value).unwrap(), value.to_string());
    }
}

#[test]
fn every_name_that_is_printed_is_parsed_and_no_other() {
    check("codec", Codec::ALL);
    check("codec", CodecChoice::ALL);
    check("layout", Layout::ALL);
    check("dtype", Dtype::ALL);
    check("favor", Favor::ALL);
    check("base kind", BaseKind::ALL);
    check("file kind", FileKind::ALL);
    check("section", Section::ALL);
}

#[test]
fn json_has_the_same_names() {
    check_json(Codec::ALL);
    check_json(Layout::ALL);
    check_json(Dtype::ALL);
    check_json(Favor::ALL);
    check_json(BaseKind::ALL);
    check_json(FileKind::ALL);
}

#[test]
fn names_are_padded_like_text() {
    assert_eq!(format!("{:<6}|{:>8}", Codec::Raw, CodecChoice::Device), "raw   |  device");
}
