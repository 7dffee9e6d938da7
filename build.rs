//! Determines the commit that is built.

use std::path::Path;
use std::process::Command;

/// Files from which the binary is built. The commit is determined again only when one of them changes: a commit without changes
/// here is the same program, and does not cost a build.
const SOURCES: [&str; 6] = ["crates", "src", "proto", "build.rs", "Cargo.toml", "Cargo.lock"];

/// Variable that names the commit where there is no git tree, as in the build of an image.
const COMMIT: &str = "RANGECACHE_BUILD_COMMIT";

fn main() {
    for source in SOURCES {
        println!("cargo:rerun-if-changed={source}");
    }
    println!("cargo:rerun-if-env-changed={COMMIT}");
    // cargo sets it for processes that it runs, too: under a name that is no setting of rangecache.
    println!("cargo:rustc-env=BUILD_COMMIT={}", commit());
}

/// Commit of the sources, `-dirty` behind it if they differ from it; `unknown` without a git tree.
fn commit() -> String {
    let given = std::env::var(COMMIT).ok();
    let given = given.filter(|commit| !commit.is_empty());
    given
        .or_else(commit_of_tree)
        .unwrap_or_else(|| "unknown".to_owned())
}

fn commit_of_tree() -> Option<String> {
    // An archive of the sources may lie in the tree of another project.
    let (root, here) = (
        git(&["rev-parse", "--show-toplevel"])?,
        std::env::var("CARGO_MANIFEST_DIR").ok()?,
    );
    if Path::new(&root).canonicalize().ok()? != Path::new(&here).canonicalize().ok()? {
        return None;
    }
    let commit = git(&["rev-parse", "--short=12", "HEAD"])?;
    let status = ["--no-optional-locks", "status", "--porcelain", "--"];
    let changes = git(&[&status[..], &SOURCES[..]].concat())?;
    Some(if changes.is_empty() {
        commit
    } else {
        format!("{commit}-dirty")
    })
}

/// Output of git; `None` if it fails.
fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}
