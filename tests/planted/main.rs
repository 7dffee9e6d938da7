//! The planted bugs must still be bugs of this source: `make planted` sees whether tests catch them.

#![allow(clippy::expect_used, clippy::panic, reason = "so a test fails")]

mod bugs;
mod plant;

use std::collections::BTreeSet;
use std::path::Path;

use plant::Source;

#[test]
fn each_planted_bug_changes_the_source_in_one_way() {
    let source = Source::read(Path::new(env!("CARGO_MANIFEST_DIR"))).expect("the source is Rust");
    let mut numbers = BTreeSet::new();
    let mut wrong = Vec::new();
    for bug in bugs::all() {
        let number = bug
            .name
            .split('-')
            .next()
            .and_then(|digits| digits.parse::<u32>().ok());
        if !number.is_some_and(|number| number > 0 && numbers.insert(number)) {
            wrong.push(format!("{}: its number is not its own", bug.name));
        }
        if [bug.what, bug.test, bug.shows].contains(&"") {
            wrong.push(format!("{}: a field is empty", bug.name));
        }
        match source.plant(bug) {
            Err(reason) => wrong.push(reason),
            Ok(files) if files.is_empty() => wrong.push(format!("{}: it changes nothing", bug.name)),
            Ok(_) => {}
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
    assert!(numbers.len() > 190, "{} bugs are planted", numbers.len());
}
