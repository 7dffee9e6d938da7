//! The planted bugs must still be bugs of this source: `make planted` sees whether tests catch them.

#![allow(clippy::expect_used, clippy::panic, reason = "so a test fails")]

use std::path::Path;
use std::process::Command;

#[test]
fn planted_patches_apply() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    if Command::new("git").arg("--version").output().is_err() {
        return;
    }
    let folder = std::fs::read_dir(root.join("tests/planted")).expect("the folder is there");
    let patches: Vec<_> = folder
        .map(|entry| entry.expect("is readable").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "patch"))
        .collect();
    assert!(
        patches.len() >= 11,
        "eleven bugs are planted, and here are {patches:?}"
    );
    for patch in patches {
        let text = std::fs::read_to_string(&patch).expect("is text");
        for field in ["Bug: ", "Test: ", "Shows: "] {
            assert!(text.contains(field), "{} does not say {field}", patch.display());
        }
        let applied = Command::new("git")
            .args(["apply", "--check"])
            .arg(&patch)
            .current_dir(root)
            // Without this a copy of the tree inside another work tree would be passed over in silence.
            .env("GIT_CEILING_DIRECTORIES", root.parent().unwrap_or(root))
            .output()
            .expect("git runs");
        assert!(
            applied.status.success(),
            "{} does not apply: {}",
            patch.display(),
            String::from_utf8_lossy(&applied.stderr)
        );
    }
}
