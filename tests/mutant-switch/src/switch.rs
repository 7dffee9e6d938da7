//! Functions with a body for each mutant.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::bodies::{self, Body};
use crate::mutant::Mutant;

/// First file of a library, which gets the code that chooses; in the folder of its crate.
const LIBRARY: &str = "src/lib.rs";
const CHOICE: &str = "
/// Number of the mutant that the environment variable `MUTANT` chooses; 0 for none.
#[doc(hidden)]
pub fn chosen_mutant() -> u32 {
    static CHOSEN: std::sync::OnceLock<u32> = std::sync::OnceLock::new();
    *CHOSEN.get_or_init(|| std::env::var(\"MUTANT\").ok().and_then(|text| text.parse().ok()).unwrap_or(0))
}
";

/// A source file, and the other bodies that mutants have for its functions.
struct Source {
    text: String,
    bodies: Vec<Body>,
    /// By index of the body: numbers of mutants, and their bodies.
    others: BTreeMap<usize, Vec<(u32, String)>>,
}

/// The mutants that one build is to have.
pub(crate) struct Switches {
    sources: BTreeMap<PathBuf, Source>,
    names: BTreeMap<u32, String>,
    tree: PathBuf,
}

impl Switches {
    /// None yet, of this tree.
    pub(crate) fn new(tree: &Path) -> Result<Self> {
        let mut switches = Switches {
            sources: BTreeMap::new(),
            names: BTreeMap::new(),
            tree: tree.to_owned(),
        };
        switches.source(Path::new(LIBRARY))?;
        let crates = std::fs::read_dir(tree.join("crates")).into_iter().flatten();
        for folder in crates {
            let library = Path::new("crates").join(folder?.file_name()).join(LIBRARY);
            switches.source(&library)?;
        }
        Ok(switches)
    }

    fn source(&mut self, path: &Path) -> Result<&mut Source> {
        if !self.sources.contains_key(path) {
            let text = std::fs::read_to_string(self.tree.join(path))
                .with_context(|| format!("cannot read {}", path.display()))?;
            let bodies = bodies::find(&text).with_context(|| path.display().to_string())?;
            let others = BTreeMap::new();
            self.sources
                .insert(path.to_owned(), Source { text, bodies, others });
        }
        self.sources.get_mut(path).context("it was just inserted")
    }

    /// Adds a mutant, or says why no switch can express it.
    pub(crate) fn add(&mut self, mutant: Mutant) -> Result<std::result::Result<(), &'static str>> {
        let mut changes = Vec::new();
        for (path, changed) in &mutant.files {
            let is_source = path.starts_with("src") || path.starts_with("crates");
            if !is_source || path == Path::new("src/main.rs") {
                return Ok(Err("it is not in the library"));
            }
            let Ok(changed_bodies) = bodies::find(changed) else {
                return Ok(Err("it is not Rust any more"));
            };
            let source = self.source(path)?;
            match source.changed_bodies(changed, &changed_bodies) {
                Ok(bodies) => {
                    changes.extend(bodies.into_iter().map(|(body, text)| (path.clone(), body, text)))
                }
                Err(reason) => return Ok(Err(reason)),
            }
        }
        for (path, body, text) in changes {
            self.source(&path)?
                .others
                .entry(body)
                .or_default()
                .push((mutant.number, text));
        }
        self.names.insert(mutant.number, mutant.name);
        Ok(Ok(()))
    }

    /// Takes a mutant out, and returns its name; `None` if it is not there.
    pub(crate) fn remove(&mut self, number: u32) -> Option<String> {
        for source in self.sources.values_mut() {
            source
                .others
                .values_mut()
                .for_each(|others| others.retain(|other| other.0 != number));
            source.others.retain(|_, others| !others.is_empty());
        }
        self.names.remove(&number)
    }

    /// Numbers and names.
    pub(crate) fn mutants(&self) -> impl Iterator<Item = (u32, &str)> {
        self.names.iter().map(|(number, name)| (*number, name.as_str()))
    }

    /// Writes the sources into the tree.
    pub(crate) fn write(&self) -> Result<Written> {
        let mut written = Written::default();
        for (path, source) in &self.sources {
            let (mut text, places) = source.with_switches();
            if path.ends_with(LIBRARY) {
                text += CHOICE;
            }
            // What is as it was is not built again.
            let target = self.tree.join(path);
            if std::fs::read_to_string(&target)? != text {
                std::fs::write(target, text)?;
            }
            written.0.insert(path.clone(), places);
        }
        Ok(written)
    }
}

impl Source {
    /// Index and new text of each body in which `changed` differs; an error if it differs elsewhere, too.
    fn changed_bodies(
        &self,
        changed: &str,
        changed_bodies: &[Body],
    ) -> std::result::Result<Vec<(usize, String)>, &'static str> {
        const ELSEWHERE: &str = "it changes more than bodies of functions";
        if changed_bodies.len() != self.bodies.len() {
            return Err(ELSEWHERE);
        }
        let (mut found, mut end, mut changed_end) = (Vec::new(), 0, 0);
        for (index, (body, other)) in self.bodies.iter().zip(changed_bodies).enumerate() {
            if self.text[end..body.range.start] != changed[changed_end..other.range.start] {
                return Err(ELSEWHERE);
            }
            let text = &changed[other.range.clone()];
            if self.text[body.range.clone()] != *text {
                if let Some(reason) = body.not_switchable {
                    return Err(reason);
                }
                found.push((index, text.to_owned()));
            }
            (end, changed_end) = (body.range.end, other.range.end);
        }
        if self.text[end..] != changed[changed_end..] {
            return Err(ELSEWHERE);
        }
        Ok(found)
    }

    /// The text with a switch in each body that mutants change, and the places of these.
    fn with_switches(&self) -> (String, Vec<Place>) {
        let (mut text, mut places, mut end) = (String::new(), Vec::new(), 0);
        let line = |text: &str| text.matches('\n').count() + 1;
        for (index, others) in &self.others {
            let range = self.bodies[*index].range.clone();
            text += &self.text[end..range.start];
            text += "{ match crate::chosen_mutant() {\n";
            let first = line(&text);
            for (number, body) in others {
                let from = line(&text);
                text += &format!("{number} => {body}\n");
                places.push(Place {
                    lines: from..line(&text),
                    mutants: BTreeSet::from([*number]),
                    is_of_one: true,
                });
            }
            text += &format!("_ => {}\n}} }}", &self.text[range.clone()]);
            places.push(Place {
                lines: first - 1..line(&text) + 1,
                mutants: others.iter().map(|(number, _)| *number).collect(),
                is_of_one: false,
            });
            end = range.end;
        }
        text += &self.text[end..];
        (text, places)
    }
}

/// Lines that belong to mutants.
pub(crate) struct Place {
    /// Lines of the file, from 1.
    lines: Range<usize>,
    /// Numbers of the mutants.
    pub(crate) mutants: BTreeSet<u32>,
    /// Whether it is the body of one mutant, and not the whole function.
    pub(crate) is_of_one: bool,
}

/// Places of the mutants in the files as they were written.
#[derive(Default)]
pub(crate) struct Written(BTreeMap<PathBuf, Vec<Place>>);

impl Written {
    /// The smallest place with this line.
    pub(crate) fn find(&self, (file, line): &(PathBuf, usize)) -> Option<&Place> {
        let places = self
            .0
            .get(file)?
            .iter()
            .filter(|place| place.lines.contains(line));
        places.min_by_key(|place| place.lines.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = "const N: u8 = 1;\npub fn a() -> u8 { 1 }\npub fn b() -> u8 { N }\n";

    fn mutant(number: u32, text: &str) -> Mutant {
        Mutant {
            number,
            name: number.to_string(),
            files: BTreeMap::from([(PathBuf::from(LIBRARY), text.to_owned())]),
        }
    }

    fn switches() -> (tempfile::TempDir, Switches) {
        let tree = tempfile::tempdir().unwrap();
        std::fs::create_dir(tree.path().join("src")).unwrap();
        std::fs::write(tree.path().join(LIBRARY), SOURCE).unwrap();
        let switches = Switches::new(tree.path()).unwrap();
        (tree, switches)
    }

    /// Results of `a()` and `b()` with each choice, from a program made of the written library.
    fn outcomes(tree: &Path, choices: &[&str]) -> Vec<String> {
        let library = std::fs::read_to_string(tree.join(LIBRARY)).unwrap();
        let main = tree.join("main.rs");
        std::fs::write(&main, library + "fn main() { print!(\"{} {}\", a(), b()); }").unwrap();
        let built = std::process::Command::new("rustc")
            .args(["--edition=2024", "-o"])
            .args([tree.join("main"), main])
            .output()
            .unwrap();
        assert!(
            built.status.success(),
            "{}",
            String::from_utf8_lossy(&built.stderr)
        );
        let run = |choice: &&str| {
            let mut program = std::process::Command::new(tree.join("main"));
            let output = program.env("MUTANT", choice).output().unwrap();
            String::from_utf8(output.stdout).unwrap()
        };
        choices.iter().map(run).collect()
    }

    #[test]
    fn number_chooses_the_body_of_its_mutant_alone() {
        let (tree, mut switches) = switches();
        let changed = |from: &str, to: &str| SOURCE.replace(from, to);
        for (number, text) in [
            (1, changed("{ 1 }", "{ 10 }")),
            (2, changed("{ 1 }", "{ 20 }")),
            (3, changed("{ N }", "{ 30 }")),
        ] {
            assert_eq!(switches.add(mutant(number, &text)).unwrap(), Ok(()));
        }
        switches.write().unwrap();
        assert_eq!(
            outcomes(tree.path(), &["", "0", "1", "2", "3", "4"]),
            ["1 1", "1 1", "10 1", "20 1", "1 30", "1 1"]
        );
        assert_eq!(switches.remove(2), Some("2".to_owned()));
        assert_eq!(switches.remove(2), None);
        switches.write().unwrap();
        assert_eq!(outcomes(tree.path(), &["1", "2"]), ["10 1", "1 1"]);
    }

    #[test]
    fn what_is_not_in_a_body_is_not_switched() {
        let (_tree, mut switches) = switches();
        let another = |text: &str| mutant(1, text);
        for text in [
            SOURCE.replace("N: u8 = 1", "N: u8 = 2"),
            format!("{SOURCE}fn c() {{}}\n"),
            SOURCE.replace("{ 1 }", "{ 1 "),
        ] {
            assert!(switches.add(another(&text)).unwrap().is_err(), "{text}");
        }
        assert_eq!(switches.mutants().count(), 0);
    }

    #[test]
    fn lines_of_an_error_lead_to_the_mutant() {
        let (tree, mut switches) = switches();
        for number in [1, 2] {
            let body = format!("{{\n {number}0\n}}");
            let text = SOURCE.replace("{ 1 }", &body);
            switches.add(mutant(number, &text)).unwrap().unwrap();
        }
        let written = switches.write().unwrap();
        let text = std::fs::read_to_string(tree.path().join(LIBRARY)).unwrap();
        for number in [1, 2] {
            let line = text
                .lines()
                .position(|line| line == format!(" {number}0"))
                .unwrap();
            let place = written.find(&(LIBRARY.into(), line + 1)).unwrap();
            assert_eq!(place.mutants, BTreeSet::from([number]));
            assert!(place.is_of_one);
        }
        let place = written.find(&(LIBRARY.into(), 2)).unwrap();
        assert_eq!(place.mutants, BTreeSet::from([1, 2]));
        assert!(written.find(&(LIBRARY.into(), 1)).is_none());
    }
}
