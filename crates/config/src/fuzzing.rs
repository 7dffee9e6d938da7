//! Fuzz target of the flags: a file of flags, and the settings that `rangecache config` prints.

#![allow(
    clippy::panic,
    clippy::unwrap_used,
    reason = "compiled for tests and fuzz targets only"
)]

use std::{collections::BTreeSet, ffi::OsString, path::Path};

use clap::{ArgMatches, CommandFactory as _, FromArgMatches as _};

use super::environment::{effective, settings};
use super::flags::Config;
use super::flags_file::{FlagsFile, FlagsFileError};

/// Flags whose files are read while the flags are checked, or whose text is never printed.
const NOT_PRINTED: [&str; 3] = ["password-file", "password", "user"];

/// The text of a flags file: what is accepted is printed by `rangecache config` in a form that means the same.
pub fn config(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    let Some((parsed, names)) = parse(text) else {
        return;
    };
    let config = Config::from_arg_matches(&parsed).unwrap();
    let shown = settings(&config, &parsed, &names);
    if NOT_PRINTED.iter().any(|flag| names.contains(*flag)) {
        return;
    }
    let accepted = config.validate();
    let printed = effective(&shown);
    let Some((again, of_file)) = parse(&printed) else {
        panic!("{printed}\nis refused");
    };
    let reread = Config::from_arg_matches(&again).unwrap();
    assert_eq!(reread.validate(), accepted);
    for (before, after) in shown.iter().zip(settings(&reread, &again, &of_file)) {
        assert!(
            before.has_value_of(&after),
            "{before:?} is read again as {after:?}"
        );
    }
}

/// The flags of a file, and their names; `None` if one is refused, with a line that exists.
fn parse(text: &str) -> Option<(ArgMatches, BTreeSet<String>)> {
    let file = match FlagsFile::parse(Path::new("flags"), text) {
        Ok(file) => file,
        Err(
            FlagsFileError::Malformed { line, .. }
            | FlagsFileError::Unknown { line, .. }
            | FlagsFileError::Value { line, .. },
        ) => {
            assert!(line >= 1 && line <= text.lines().count());
            return None;
        }
        Err(other) => panic!("{other}"),
    };
    let none = Config::command().try_get_matches_from(["rangecache"]).unwrap();
    let (arguments, names) = file.missing_in(&none);
    let arguments = std::iter::once(OsString::from("rangecache")).chain(arguments);
    // Refused only for a flag that is given twice.
    let matches = Config::command().try_get_matches_from(arguments).ok()?;
    Some((matches, names))
}
