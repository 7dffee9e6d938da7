//! The file of `--flags-file`: variables that are set neither by the environment nor, as flags, on the command line. It has
//! the form in which `rangecache config` prints the settings.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::{ffi::OsString, fs};

use clap::{ArgMatches, CommandFactory as _, parser::ValueSource};

use super::environment::{suggestion, variable};
use super::flags::Config;

/// Longest file that is read, in bytes.
const MAX_BYTES: u64 = 1 << 20;

/// Flags of a file, in its order.
#[derive(Clone, Debug, Default)]
pub struct FlagsFile {
    path: PathBuf,
    entries: Vec<FlagsFileLine>,
}

/// Line of the file that sets a flag. `Debug` omits the value, which may be a secret.
#[derive(Clone)]
struct FlagsFileLine {
    line: usize,
    /// Flag, without its dashes.
    flag: String,
    value: String,
}

impl std::fmt::Debug for FlagsFileLine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Entry")
            .field("line", &self.line)
            .field("flag", &self.flag)
            .finish_non_exhaustive()
    }
}

/// Why the file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FlagsFileError {
    /// The file cannot be read.
    #[error("--flags-file {} cannot be read: {error}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// A line is not of the form VARIABLE=value.
    #[error("--flags-file {}, line {line}: write VARIABLE=value, for example RANGECACHE_MAX_CALLS=1000, or # and a comment", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// Number of the line.
        line: usize,
    },
    /// A line names no flag of serving.
    #[error("--flags-file {}, line {line}: {name} is no setting of rangecache{suggestion}", path.display())]
    Unknown {
        /// The file.
        path: PathBuf,
        /// Number of the line.
        line: usize,
        /// The name.
        name: String,
        /// End of the text: what may have been meant.
        suggestion: String,
    },
    /// A value is not accepted, or a flag is given twice.
    #[error("--flags-file {}, line {line}: {error}", path.display())]
    Value {
        /// The file.
        path: PathBuf,
        /// Number of the line.
        line: usize,
        /// Error of the flag's parser.
        error: String,
    },
}

impl FlagsFile {
    /// Reads the file, and checks each line by itself.
    ///
    /// # Errors
    /// [`FlagsFileError`].
    pub fn read(path: &Path) -> Result<FlagsFile, FlagsFileError> {
        let unreadable = |error| FlagsFileError::Unreadable {
            path: path.to_owned(),
            error,
        };
        if fs::metadata(path).map_err(unreadable)?.len() > MAX_BYTES {
            return Err(unreadable(std::io::Error::other("it is larger than 1 MiB")));
        }
        let text = fs::read_to_string(path).map_err(unreadable)?;
        FlagsFile::parse(path, &text)
    }

    pub(super) fn parse(path: &Path, text: &str) -> Result<FlagsFile, FlagsFileError> {
        let command = Config::command();
        // A file would name another file with other flags.
        let flags = command
            .get_opts()
            .filter(|flag| flag.get_long() != Some("flags-file"));
        let known: BTreeMap<String, &str> = flags
            .filter_map(|flag| Some((variable(flag)?, flag.get_long()?)))
            .collect();
        let mut file = FlagsFile {
            path: path.to_owned(),
            entries: Vec::new(),
        };
        for (index, text) in text.lines().enumerate() {
            let (line, text) = (index + 1, text.trim());
            if text.is_empty() || text.starts_with('#') {
                continue;
            }
            let Some((name, value)) = text.split_once('=') else {
                let path = path.to_owned();
                return Err(FlagsFileError::Malformed { path, line });
            };
            let (name, value) = (name.trim(), unquoted(value.trim()));
            let Some(flag) = known.get(name) else {
                return Err(FlagsFileError::Unknown {
                    path: path.to_owned(),
                    line,
                    name: name.to_owned(),
                    suggestion: suggestion(known.keys(), name),
                });
            };
            let flag = (*flag).to_owned();
            let entry = FlagsFileLine { line, flag, value };
            file.check(&entry)?;
            file.entries.push(entry);
        }
        Ok(file)
    }

    /// Checks the value of `entry` with the flag's own parser.
    fn check(&self, entry: &FlagsFileLine) -> Result<(), FlagsFileError> {
        match Config::command().try_get_matches_from([OsString::from("rangecache"), entry.argument()]) {
            Ok(_) => Ok(()),
            Err(error) => Err(self.refused(entry, summary(&error))),
        }
    }

    fn refused(&self, entry: &FlagsFileLine, error: String) -> FlagsFileError {
        FlagsFileError::Value {
            path: self.path.clone(),
            line: entry.line,
            error,
        }
    }

    /// The flags that `given` has neither from the command line nor from the environment, as arguments, and their names.
    pub fn missing_in(&self, given: &ArgMatches) -> (Vec<OsString>, BTreeSet<String>) {
        let (mut arguments, mut names) = (Vec::new(), BTreeSet::new());
        let command = Config::command();
        for entry in &self.entries {
            let flag = command
                .get_opts()
                .find(|flag| flag.get_long() == Some(entry.flag.as_str()));
            let source = flag.and_then(|flag| given.value_source(flag.get_id().as_str()));
            if !matches!(source, Some(ValueSource::CommandLine | ValueSource::EnvVariable)) {
                arguments.push(entry.argument());
                names.insert(entry.flag.clone());
            }
        }
        (arguments, names)
    }
}

impl FlagsFileLine {
    /// The line as an argument.
    fn argument(&self) -> OsString {
        format!("--{}={}", self.flag, self.value).into()
    }
}

/// `value` without the quotes around it, as `rangecache config` writes them.
fn unquoted(value: &str) -> String {
    let inner = value
        .strip_prefix('\'')
        .and_then(|value| value.strip_suffix('\''));
    inner.map_or_else(|| value.to_owned(), |inner| inner.replace(r"'\''", "'"))
}

/// First line of a parser's error.
pub fn summary(error: &clap::Error) -> String {
    let text = error.to_string();
    let first = text.lines().next().unwrap_or_default();
    first.strip_prefix("error: ").unwrap_or(first).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<FlagsFile, String> {
        FlagsFile::parse(Path::new("flags"), text).map_err(|error| error.to_string())
    }

    #[test]
    fn lines_are_variables_as_rangecache_config_prints_them() {
        let text = "# a comment\n\nRANGECACHE_MAX_CALLS = 7\nRANGECACHE_CACHE_PREFIX=/a/,/b/\n\
                    RANGECACHE_LOG_LEVEL='info,h2=debug'\nRANGECACHE_SOCKET_REUSE_PORT=true\nRANGECACHE_AUTO_TLS=false\n";
        let given = Config::command().try_get_matches_from(["rangecache"]).unwrap();
        let (arguments, names) = parse(text).unwrap().missing_in(&given);
        let expected = [
            "--max-calls=7",
            "--cache-prefix=/a/,/b/",
            "--log-level=info,h2=debug",
            "--socket-reuse-port=true",
            "--auto-tls=false",
        ];
        assert_eq!(arguments, expected);
        assert_eq!(names.len(), 5);
    }

    #[test]
    fn flags_of_the_command_line_win() {
        let given = Config::command()
            .try_get_matches_from(["rangecache", "--max-calls=9"])
            .unwrap();
        let (arguments, _) = parse("RANGECACHE_MAX_CALLS=7\nRANGECACHE_LOG_LEVEL=warn")
            .unwrap()
            .missing_in(&given);
        assert_eq!(arguments, ["--log-level=warn"]);
    }

    #[test]
    fn unusable_lines_are_refused_with_their_number() {
        for (text, says) in [
            (
                "\nRANGECACHE_MAX_CALS=7",
                "line 2: RANGECACHE_MAX_CALS is no setting of rangecache: did you mean RANGECACHE_MAX_CALLS?",
            ),
            (
                "RANGECACHE_FLAGS_FILE=other",
                "line 1: RANGECACHE_FLAGS_FILE is no setting",
            ),
            ("max-calls=7", "line 1: max-calls is no setting"),
            ("RANGECACHE_MAX_CALLS", "line 1: write VARIABLE=value"),
            (
                "RANGECACHE_MAX_CALLS=0",
                "line 1: invalid value '0' for '--max-calls",
            ),
            (
                "RANGECACHE_SOCKET_REUSE_PORT=perhaps",
                "line 1: invalid value 'perhaps'",
            ),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(says), "{error}");
        }
    }
}
