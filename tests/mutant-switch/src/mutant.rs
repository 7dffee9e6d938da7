//! A mutant: some files of the tree with other contents.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;

/// A change of the source.
#[derive(Clone, Debug)]
pub(crate) struct Mutant {
    /// Number that chooses it, at least 1.
    pub(crate) number: u32,
    /// Name that cargo-mutants gives it, or its patch's file name.
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

/// The mutants that patches make, each with the number that its file name begins with.
pub(crate) fn of_patches(tree: &Path, patches: &[&str]) -> Result<Vec<Mutant>> {
    let mut mutants: Vec<Mutant> = Vec::new();
    for patch in patches {
        let path = std::fs::canonicalize(patch).with_context(|| format!("cannot read {patch}"))?;
        let name = path
            .file_stem()
            .context("a patch is a file")?
            .to_string_lossy()
            .into_owned();
        let digits: String = name.chars().take_while(char::is_ascii_digit).collect();
        let number = digits
            .parse()
            .with_context(|| format!("{patch} begins with no number"))?;
        ensure!(
            number > 0 && mutants.iter().all(|other| other.number != number),
            "{patch}: its number must be its own, and at least 1"
        );
        let files = patched(tree, &path).with_context(|| format!("cannot apply {patch}"))?;
        mutants.push(Mutant { number, name, files });
    }
    Ok(mutants)
}

/// The files of a patch as they are with it.
fn patched(tree: &Path, patch: &Path) -> Result<BTreeMap<PathBuf, String>> {
    let text = std::fs::read_to_string(patch)?;
    let paths: BTreeSet<PathBuf> = text
        .lines()
        .filter_map(|line| line.strip_prefix("--- a/"))
        .map(PathBuf::from)
        .collect();
    let folder = tempfile::tempdir()?;
    for path in &paths {
        let copy = folder.path().join(path);
        std::fs::create_dir_all(copy.parent().context("a file lies in a folder")?)?;
        std::fs::copy(tree.join(path), copy)?;
    }
    // The copy is no work tree of git's, wherever it lies.
    let applied = Command::new("git")
        .arg("apply")
        .arg(patch)
        .current_dir(folder.path())
        .env("GIT_CEILING_DIRECTORIES", folder.path())
        .output()
        .context("cannot run git")?;
    ensure!(
        applied.status.success(),
        "{}",
        String::from_utf8_lossy(&applied.stderr)
    );
    paths
        .into_iter()
        .map(|path| {
            let text = std::fs::read_to_string(folder.path().join(&path))?;
            Ok((path, text))
        })
        .collect()
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

    #[test]
    fn patches_have_the_numbers_of_their_names() {
        let tree = tempfile::tempdir().unwrap();
        std::fs::write(tree.path().join("a.rs"), "one\ntwo\n").unwrap();
        let patch = |name: &str| {
            let path = tree.path().join(name);
            std::fs::write(
                &path,
                "Bug: a\n\n--- a/a.rs\n+++ b/a.rs\n@@ -1,2 +1,2 @@\n one\n-two\n+2\n",
            )
            .unwrap();
            path.to_str().unwrap().to_owned()
        };
        let (first, same, none) = (patch("07-a.patch"), patch("07-b.patch"), patch("a.patch"));
        let mutants = of_patches(tree.path(), &[&first]).unwrap();
        assert_eq!((mutants[0].number, mutants[0].name.as_str()), (7, "07-a"));
        assert_eq!(mutants[0].files[Path::new("a.rs")], "one\n2\n");
        assert!(
            of_patches(tree.path(), &[&first, &same]).is_err(),
            "a number twice"
        );
        assert!(of_patches(tree.path(), &[&none]).is_err(), "no number");
    }
}
