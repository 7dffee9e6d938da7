//! A mutant: some files of the tree with other contents.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Error, Result, bail, ensure};
use serde::Deserialize;

use crate::bugs;
use crate::plant::Source;

/// A change of the source.
#[derive(Clone, Debug)]
pub(crate) struct Mutant {
    /// Number that chooses it, at least 1.
    pub(crate) number: u32,
    /// Name that cargo-mutants gives it, or of the planted bug.
    pub(crate) name: String,
    /// New contents of the files that it changes, by their path in the tree.
    pub(crate) files: BTreeMap<PathBuf, String>,
}

impl Mutant {
    /// Changes the tree without a switch.
    pub(crate) fn replace_original(&self, tree: &Path) -> Result<()> {
        for (path, text) in &self.files {
            std::fs::write(tree.join(path), text)?;
        }
        Ok(())
    }
}

/// Mutant in the output of `cargo mutants --list --json`, as far as it is needed.
#[derive(Deserialize)]
struct Listed {
    name: String,
    file: PathBuf,
    span: Span,
    replacement: String,
}

#[derive(Deserialize)]
struct Span {
    start: Position,
    end: Position,
}

/// Both from 1; columns are characters.
#[derive(Deserialize)]
struct Position {
    line: usize,
    column: usize,
}

impl Position {
    /// Byte of the file.
    fn offset(&self, text: &str) -> Result<usize> {
        let mut start = 0;
        for (number, line) in text.split_inclusive('\n').enumerate() {
            if number + 1 == self.line {
                let mut columns = line.char_indices().map(|(at, _)| at).chain([line.len()]);
                let column = columns
                    .nth(self.column - 1)
                    .context("a column that the line has")?;
                return Ok(start + column);
            }
            start += line.len();
        }
        bail!("no line {}", self.line)
    }
}

/// Mutants of a list of cargo-mutants that `names` names, a line each, numbered from 1 in the order of `names`.
pub(crate) fn listed(tree: &Path, list: &Path, names: &str) -> Result<Vec<Mutant>> {
    let text = std::fs::read_to_string(list).with_context(|| format!("cannot read {}", list.display()))?;
    let all: Vec<Listed> = serde_json::from_str(&text).context("not a list of cargo-mutants")?;
    let all: BTreeMap<&str, &Listed> = all.iter().map(|listed| (listed.name.as_str(), listed)).collect();
    let mut mutants = Vec::new();
    for (number, name) in (1..).zip(names.lines()) {
        let listed = all
            .get(name)
            .with_context(|| format!("no mutant is named {name}"))?;
        let original = std::fs::read_to_string(tree.join(&listed.file))?;
        let (start, end) = (
            listed.span.start.offset(&original)?,
            listed.span.end.offset(&original)?,
        );
        ensure!(start <= end, "{name}: it ends before it begins");
        let text = format!("{}{}{}", &original[..start], listed.replacement, &original[end..]);
        mutants.push(Mutant {
            number,
            name: name.to_owned(),
            files: BTreeMap::from([(listed.file.clone(), text)]),
        });
    }
    Ok(mutants)
}

/// The planted bugs of these names, each with the number that its name begins with.
pub(crate) fn planted(tree: &Path, names: &[&str]) -> Result<Vec<Mutant>> {
    let source = Source::read(tree).map_err(Error::msg)?;
    let planted = |name: &&str| {
        let bug = bugs::all()
            .find(|bug| bug.name == *name)
            .with_context(|| format!("no planted bug is named {name}"))?;
        let number = bug.name.split('-').next().unwrap_or_default();
        Ok(Mutant {
            number: number
                .parse()
                .with_context(|| format!("{name} begins with no number"))?,
            name: bug.name.to_owned(),
            files: source.plant(bug).map_err(Error::msg)?,
        })
    };
    names.iter().map(planted).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listed_mutants_replace_their_span_in_characters() {
        let tree = tempfile::tempdir().unwrap();
        let source = "// äöü\nfn a() -> bool { \"é\" > \"e\" }\n";
        std::fs::write(tree.path().join("a.rs"), source).unwrap();
        let list = tree.path().join("list.json");
        let listed_text = r#"[{"name": "a.rs:2:22: replace > with <", "file": "a.rs", "replacement": "<",
            "span": {"start": {"line": 2, "column": 22}, "end": {"line": 2, "column": 23}}}]"#;
        std::fs::write(&list, listed_text).unwrap();
        let mutants = listed(tree.path(), &list, "a.rs:2:22: replace > with <\n").unwrap();
        let [mutant] = &mutants[..] else {
            panic!("{mutants:?}");
        };
        assert_eq!(mutant.number, 1);
        assert_eq!(
            mutant.files[Path::new("a.rs")],
            source.replace('>', "<").replace("-<", "->")
        );
        assert!(listed(tree.path(), &list, "another").is_err());
    }
}
