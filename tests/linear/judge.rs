//! Asks the linearizer.

use std::path::Path;
use std::process::Command;

use crate::support::process::tool;

/// What the linearizer says of a history.
pub struct Verdict {
    /// No violation was found.
    pub right: bool,
    /// All that it printed.
    pub text: String,
}

/// Has a history judged.
pub fn judge(history: &Path) -> Verdict {
    let output = Command::new(tool("linearizer"))
        .arg(history)
        .output()
        .expect("the linearizer runs");
    let text = [output.stdout, output.stderr].concat();
    Verdict {
        right: output.status.success(),
        text: String::from_utf8_lossy(&text).trim_end().to_owned(),
    }
}
