//! Puts many mutants of rangecache into one build, so that each costs a run of the tests and not a build.
//!
//! A mutant changes the bodies of functions. The body of each such function becomes a `match` on the number of the mutant that
//! the environment variable `MUTANT` chooses, with the mutants' bodies as its arms and the original as the last one:
//!
//! ```text
//! mutant-switch TREE REPORT mutants LISTED.json NAMES.txt    those of cargo-mutants that NAMES.txt names, a line each
//! mutant-switch TREE REPORT planted NAME...                  these bugs of tests/planted, each numbered by its first digits
//! mutant-switch TREE REPORT one LISTED.json NAME             one mutant, in place of the original, without a switch
//! mutant-switch TREE REPORT plant NAME                       one bug of tests/planted in the same way
//! mutant-switch bugs                                         prints name, test, what it shows, and what the bug is, by tabs
//! ```
//!
//! TREE is a copy of rangecache's tree, whose files are changed. The library is then built; mutants that do not compile are left
//! out, until it builds. In the folder REPORT are written:
//!
//! - `switched.txt`: number and name of each mutant in the build;
//! - `unviable.txt`: names of those that do not compile;
//! - `separate.txt`: names and reasons of those that a switch cannot express, as those of constants. They need a build of their own.

mod bodies;
#[path = "../../planted/bugs/mod.rs"]
mod bugs;
mod build;
mod mutant;
#[path = "../../planted/plant.rs"]
mod plant;
mod switch;

use std::fmt::Write as _;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};

use crate::mutant::Mutant;
use crate::switch::Switches;

const USAGE: &str = "usage: mutant-switch TREE REPORT (mutants LISTED.json NAMES.txt | planted NAME... | one LISTED.json NAME | plant NAME), or mutant-switch bugs";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &[&str]) -> Result<()> {
    if let ["bugs"] = arguments {
        for bug in bugs::all() {
            println!("{}\t{}\t{}\t{}", bug.name, bug.test, bug.shows, bug.what);
        }
        return Ok(());
    }
    let [tree, report, kind, rest @ ..] = arguments else {
        bail!(USAGE);
    };
    let (tree, report) = (Path::new(tree), Path::new(report));
    let mutants = match (*kind, rest) {
        ("mutants", [listed, names]) => {
            let names = std::fs::read_to_string(names).with_context(|| format!("cannot read {names}"))?;
            mutant::listed(tree, Path::new(listed), &names)?
        }
        ("planted", names) => mutant::planted(tree, names)?,
        ("one", [listed, name]) => {
            return replace_originals(tree, &mutant::listed(tree, Path::new(listed), name)?);
        }
        ("plant", [name]) => return replace_originals(tree, &mutant::planted(tree, &[name])?),
        _ => bail!(USAGE),
    };
    switch_all(tree, report, mutants)
}

fn replace_originals(tree: &Path, mutants: &[Mutant]) -> Result<()> {
    mutants
        .iter()
        .try_for_each(|mutant| mutant.replace_original(tree))
}

fn switch_all(tree: &Path, report: &Path, mutants: Vec<Mutant>) -> Result<()> {
    let mut switches = Switches::new(tree)?;
    let mut separate = Vec::new();
    for mutant in mutants {
        let name = mutant.name.clone();
        if let Err(reason) = switches.add(mutant)? {
            separate.push((name, reason));
        }
    }
    let mut unviable = Vec::new();
    loop {
        let written = switches.write()?;
        eprintln!("{} mutants in one build", switches.mutants().count());
        let errors = build::library(tree)?;
        if errors.is_empty() {
            break;
        }
        let mut removed = 0;
        for error in &errors {
            let Some(place) = error.places.iter().find_map(|place| written.find(place)) else {
                bail!("the tree does not build without mutants either:\n{}", error.text);
            };
            for number in &place.mutants {
                let Some(mutant) = switches.remove(*number) else {
                    continue;
                };
                removed += 1;
                if place.is_of_one {
                    unviable.push(mutant);
                } else {
                    separate.push((mutant, "its type differs from the original's"));
                }
            }
        }
        if removed == 0 {
            bail!(
                "errors of mutants that were left out already:\n{}",
                errors[0].text
            );
        }
    }
    let mut switched = String::new();
    for (number, name) in switches.mutants() {
        writeln!(switched, "{number}\t{name}")?;
    }
    let separate: String = separate
        .iter()
        .map(|(name, reason)| format!("{name}\t{reason}\n"))
        .collect();
    std::fs::create_dir_all(report)?;
    std::fs::write(report.join("switched.txt"), switched)?;
    std::fs::write(
        report.join("unviable.txt"),
        unviable
            .iter()
            .map(|name| format!("{name}\n"))
            .collect::<String>(),
    )?;
    std::fs::write(report.join("separate.txt"), separate)?;
    Ok(())
}
