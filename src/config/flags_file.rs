//! The file of `--flags-file`: flags that are given neither on the command line nor in the environment.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use clap::parser::ValueSource;
use clap::{ArgAction, ArgMatches, CommandFactory as _};

use super::environment::{PREFIX, is_false, is_true};
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
    /// A line is not of the form flag=value.
    #[error("--flags-file {}, line {line}: write flag=value, for example max-calls=1000, or # and a comment", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// Number of the line.
        line: usize,
    },
    /// A line names no flag.
    #[error("--flags-file {}, line {line}: {name} is no flag of serving: did you mean {nearest}?", path.display())]
    Unknown {
        /// The file.
        path: PathBuf,
        /// Number of the line.
        line: usize,
        /// The name.
        name: String,
        /// The flag that differs least from it.
        nearest: String,
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
        let known = Config::command();
        // It would name another file with other flags.
        let known: BTreeSet<&str> = known
            .get_opts()
            .filter_map(clap::Arg::get_long)
            .filter(|flag| *flag != "flags-file")
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
            let flag = flag_of(name);
            if !known.contains(flag.as_str()) {
                let distance = |known: &&&str| strsim::damerau_levenshtein(known, &flag);
                return Err(FlagsFileError::Unknown {
                    path: path.to_owned(),
                    line,
                    name: name.to_owned(),
                    nearest: (*known.iter().min_by_key(distance).unwrap_or(&"")).to_owned(),
                });
            }
            let entry = FlagsFileLine { line, flag, value };
            file.check(&entry)?;
            file.entries.push(entry);
        }
        Ok(file)
    }

    /// Checks the value of `entry` with the flag's own parser.
    fn check(&self, entry: &FlagsFileLine) -> Result<(), FlagsFileError> {
        let argument = entry.argument().map_err(|error| self.refused(entry, error))?;
        let arguments = [Some(OsString::from("rangecache")), argument];
        match Config::command().try_get_matches_from(arguments.into_iter().flatten()) {
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
                arguments.extend(entry.argument().ok().flatten());
                names.insert(entry.flag.clone());
            }
        }
        (arguments, names)
    }
}

impl FlagsFileLine {
    /// The line as an argument; `None` for a switch that is off.
    fn argument(&self) -> Result<Option<OsString>, String> {
        let command = Config::command();
        let flag = command
            .get_opts()
            .find(|flag| flag.get_long() == Some(self.flag.as_str()));
        // Other flags of two values take one.
        let is_switch = flag.is_some_and(|flag| {
            let takes_value = flag.get_num_args().is_some_and(|values| values.takes_values());
            matches!(flag.get_action(), ArgAction::SetTrue) && !takes_value
        });
        match self.value.as_str() {
            value if is_switch && is_true(value) => Ok(Some(format!("--{}", self.flag).into())),
            value if is_switch && is_false(value) => Ok(None),
            value if is_switch => Err(format!("{value:?} is neither true nor false")),
            value => Ok(Some(format!("--{}={value}", self.flag).into())),
        }
    }
}

/// The flag that a line names: `max-calls`, `--max-calls`, `max_calls` or `RANGECACHE_MAX_CALLS`.
fn flag_of(name: &str) -> String {
    let name = name.strip_prefix("export ").unwrap_or(name).trim();
    let name = name.strip_prefix("--").unwrap_or(name);
    let name = name.strip_prefix(PREFIX).unwrap_or(name);
    name.to_ascii_lowercase().replace('_', "-")
}

/// `value` without the quotes around it, as `rangecache config` writes them.
fn unquoted(value: &str) -> String {
    for quote in ['\'', '"'] {
        let inner = value
            .strip_prefix(quote)
            .and_then(|value| value.strip_suffix(quote));
        if let Some(inner) = inner {
            return inner.replace(r"'\''", "'");
        }
    }
    value.to_owned()
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
    fn lines_name_flags_as_the_command_line_and_the_environment_do() {
        let text = "# a comment\n\nmax-calls = 7\n--cache-prefix=/a/,/b/\nRANGECACHE_LOG_LEVEL='info,h2=debug'\n\
                    socket-reuse-port=true\nauto_tls=false\n";
        let given = Config::command().try_get_matches_from(["rangecache"]).unwrap();
        let (arguments, names) = parse(text).unwrap().missing_in(&given);
        let expected = [
            "--max-calls=7",
            "--cache-prefix=/a/,/b/",
            "--log-level=info,h2=debug",
            "--socket-reuse-port",
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
        let (arguments, _) = parse("max-calls=7\nlog-level=warn").unwrap().missing_in(&given);
        assert_eq!(arguments, ["--log-level=warn"]);
    }

    #[test]
    fn unusable_lines_are_refused_with_their_number() {
        for (text, says) in [
            (
                "\nmax-cals=7",
                "line 2: max-cals is no flag of serving: did you mean max-calls?",
            ),
            ("flags-file=other", "line 1: flags-file is no flag"),
            ("max-calls", "line 1: write flag=value"),
            ("max-calls=0", "line 1: invalid value '0' for '--max-calls"),
            ("socket-reuse-port=perhaps", "neither true nor false"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(says), "{error}");
        }
    }
}
