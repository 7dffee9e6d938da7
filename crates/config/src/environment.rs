//! Environment variables of the flags, and the effective settings as text.

use std::{collections::BTreeSet, fmt::Write as _};

use clap::{Arg, ArgMatches, Command, CommandFactory as _, parser::ValueSource};

use super::flags::Config;

/// Beginning of every variable's name.
const PREFIX: &str = "RANGECACHE_";

/// Gives every flag of serving that `command` has its environment variable: `RANGECACHE_` and the long name.
#[must_use]
pub fn with_environment(command: Command) -> Command {
    let serving = Config::command();
    command.mut_args(|arg| {
        let is_ours = serving.get_opts().any(|flag| flag.get_id() == arg.get_id());
        match variable(&arg) {
            Some(name) if is_ours => {
                // A number below zero is a value, which is refused as one, not an unknown flag.
                let takes_values = arg.get_action().takes_values();
                arg.env(name).allow_negative_numbers(takes_values)
            }
            _ => arg,
        }
    })
}

/// The environment variable of a flag.
pub(super) fn variable(arg: &Arg) -> Option<String> {
    Some(variable_of(arg.get_long()?))
}

/// The environment variable of the flag with this name.
fn variable_of(flag: &str) -> String {
    let name = flag.to_ascii_uppercase().replace('-', "_");
    format!("{PREFIX}{name}")
}

/// Variables that are not settings: of debug builds, in which tests inject faults, and of the build itself.
const OTHERS: [&str; 2] = ["RANGECACHE_TEST_FAULTS", "RANGECACHE_BUILD_COMMIT"];

/// A variable that looks like a setting and is none.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name} in the environment is no setting of rangecache{suggestion} Otherwise unset it")]
pub struct UnknownVariable {
    name: String,
    suggestion: String,
}

/// A known name that `name` may have been meant to be, as the end of an error: `: did you mean …?`. If none is like it, where
/// the names are listed.
pub(super) fn suggestion<'a>(known: impl Iterator<Item = &'a String>, name: &str) -> String {
    let distances = known.map(|known| (strsim::damerau_levenshtein(known, name), known));
    // Of the part behind the common beginning a third may differ.
    let most = (name.len().saturating_sub(PREFIX.len()) / 3).max(2);
    match distances.min() {
        Some((distance, nearest)) if distance <= most => format!(": did you mean {nearest}?"),
        _ => "; `rangecache --help` lists them.".to_owned(),
    }
}

/// Checks that each of `variables` whose name begins with `RANGECACHE_` is that of a flag, so that a misspelt one is not
/// ignored.
///
/// # Errors
/// The first unknown variable.
pub fn check_names(variables: impl Iterator<Item = (String, String)>) -> Result<(), UnknownVariable> {
    let known: Vec<String> = Config::command().get_opts().filter_map(variable).collect();
    for (name, value) in variables {
        let is_ours = name.starts_with(PREFIX) && !OTHERS.contains(&name.as_str());
        if !is_ours || known.contains(&name) || is_service_link(&name, &value) {
            continue;
        }
        let suggestion = suggestion(known.iter(), &name);
        return Err(UnknownVariable { name, suggestion });
    }
    Ok(())
}

/// Whether Kubernetes or Docker sets this variable for a service or container named `rangecache` or `rangecache-…`:
/// `…_SERVICE_HOST`, `…_SERVICE_PORT[_NAME]`, `…_PORT` with a URL, `…_PORT_<NUMBER>_TCP[_…]`.
fn is_service_link(name: &str, value: &str) -> bool {
    let ports = |(_, port): (&str, &str)| port.starts_with(|first: char| first.is_ascii_digit());
    name.ends_with("_SERVICE_HOST")
        || name.ends_with("_SERVICE_PORT")
        || name.contains("_SERVICE_PORT_")
        || (name.ends_with("_PORT") && value.contains("://"))
        || name.split_once("_PORT_").is_some_and(ports)
}

/// Source of a flag's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlagOrigin {
    /// The command line.
    CommandLine,
    /// A variable `RANGECACHE_…`.
    Environment,
    /// The file of `--flags-file`.
    File,
    /// None of them.
    Default,
}

impl FlagOrigin {
    /// All of them, those that win first.
    const ALL: [FlagOrigin; 4] = [
        FlagOrigin::CommandLine,
        FlagOrigin::Environment,
        FlagOrigin::File,
        FlagOrigin::Default,
    ];

    /// Words for the operator.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            FlagOrigin::CommandLine => "command line",
            FlagOrigin::Environment => "environment",
            FlagOrigin::File => "flags file",
            FlagOrigin::Default => "default",
        }
    }
}

/// The effective value of one flag.
#[derive(Clone, PartialEq, Eq)]
pub struct Setting {
    /// Flag, without its dashes.
    pub flag: String,
    /// Source of the value: command line, environment, flags file or default.
    pub source: FlagOrigin,
    value: Option<String>,
    is_secret: bool,
}

impl std::fmt::Debug for Setting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}={}", self.flag, self.shown())
    }
}

impl Setting {
    /// The value as it may be shown: empty if there is none, and `(secret)` in the place of a secret.
    #[must_use]
    pub fn shown(&self) -> &str {
        match &self.value {
            Some(_) if self.is_secret => "(secret)",
            Some(value) => value,
            None => "",
        }
    }

    /// Whether both have the same value.
    #[must_use]
    pub fn has_value_of(&self, other: &Setting) -> bool {
        self.value == other.value
    }
}

/// Every flag of serving with its effective value; those in `of_file` were taken from the file of `--flags-file`.
#[must_use]
pub fn settings(config: &Config, matches: &ArgMatches, of_file: &BTreeSet<String>) -> Vec<Setting> {
    let serving = Config::command();
    let mut settings = Vec::new();
    for flag in serving.get_opts() {
        let Some(name) = flag.get_long() else {
            continue;
        };
        let source = match matches.value_source(flag.get_id().as_str()) {
            _ if of_file.contains(name) => FlagOrigin::File,
            Some(ValueSource::CommandLine) => FlagOrigin::CommandLine,
            Some(ValueSource::EnvVariable) => FlagOrigin::Environment,
            _ => FlagOrigin::Default,
        };
        settings.push(Setting {
            flag: name.to_owned(),
            source,
            value: value(flag, config, matches),
            is_secret: flag.is_hide_env_values_set(),
        });
    }
    settings
}

/// Every setting as `VARIABLE=value`, grouped by where it comes from; for a shell, an environment file or a container.
/// Settings without a value and secrets are comments.
#[must_use]
pub fn effective(settings: &[Setting]) -> String {
    let mut text = String::new();
    for source in FlagOrigin::ALL {
        let heading = match source {
            FlagOrigin::CommandLine => "From the command line",
            FlagOrigin::Environment => "From the environment",
            FlagOrigin::File => "From the flags file",
            FlagOrigin::Default => "Defaults",
        };
        // Writing into a String cannot fail.
        let _ = writeln!(text, "# {heading}");
        for setting in settings.iter().filter(|setting| setting.source == source) {
            let name = variable_of(&setting.flag);
            let _ = match &setting.value {
                Some(_) if setting.is_secret => writeln!(text, "# {name}=(secret)"),
                Some(value) => writeln!(text, "{name}={}", quoted(value)),
                None => writeln!(text, "# {name}="),
            };
        }
    }
    text
}

/// The settings that were given, as flags on one line, secrets masked.
#[must_use]
pub fn given(settings: &[Setting]) -> String {
    let given = settings
        .iter()
        .filter(|setting| setting.source != FlagOrigin::Default);
    let flags = given.map(|setting| format!("--{}={}", setting.flag, quoted(setting.shown())));
    flags.collect::<Vec<_>>().join(" ")
}

/// The value of a flag as it would be written; `None` if it has none.
fn value(flag: &Arg, config: &Config, matches: &ArgMatches) -> Option<String> {
    if let Some(values) = matches.get_raw(flag.get_id().as_str()) {
        let values: Vec<_> = values.map(|value| value.to_string_lossy()).collect();
        return Some(values.join(","));
    }
    // Defaults that depend on the machine.
    match flag.get_long() {
        Some("cache-max-bytes") => Some(config.mirror.max_bytes().to_string()),
        Some("worker-threads") => Some(config.limits.worker_threads().to_string()),
        Some("log-format") => Some(if config.log.is_json() { "json" } else { "text" }.to_owned()),
        _ => None,
    }
}

/// `value`, in single quotes if a shell would not take it literally.
fn quoted(value: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_-./:,=@+%".contains(c);
    if !value.is_empty() && value.chars().all(is_plain) {
        value.to_owned()
    } else {
        format!("'{}'", value.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use clap::FromArgMatches as _;

    use super::*;

    fn printed(flags: &[&str]) -> String {
        let matches = Config::command()
            .try_get_matches_from(std::iter::once(&"rangecache").chain(flags))
            .unwrap();
        let config = Config::from_arg_matches(&matches).unwrap();
        effective(&settings(&config, &matches, &BTreeSet::new()))
    }

    #[test]
    fn every_flag_has_the_variable_of_its_name() {
        let command = with_environment(Config::command());
        for flag in command.get_opts() {
            let expected = variable(flag).unwrap();
            assert_eq!(flag.get_env().unwrap().to_str(), Some(expected.as_str()));
        }
        let endpoints = command
            .get_opts()
            .find(|flag| flag.get_long() == Some("endpoints"));
        assert_eq!(endpoints.unwrap().get_env().unwrap(), "RANGECACHE_ENDPOINTS");
    }

    #[test]
    fn misspelt_variables_are_refused_with_the_nearest_name() {
        let with =
            |name: &str, value: &str| check_names(std::iter::once((name.to_owned(), value.to_owned())));
        let check = |name: &str| with(name, "true");
        for (name, nearest) in [
            ("RANGECACHE_ENDPOINT", "RANGECACHE_ENDPOINTS"),
            ("RANGECACHE_CACHE_PREFIXES", "RANGECACHE_CACHE_PREFIX"),
            ("RANGECACHE_CACHE_MAX_BYTE", "RANGECACHE_CACHE_MAX_BYTES"),
            ("RANGECACHE_LOGLEVEL", "RANGECACHE_LOG_LEVEL"),
            ("RANGECACHE_SOCKET_REUSEPORT", "RANGECACHE_SOCKET_REUSE_PORT"),
            ("RANGECACHE_SOCKETS_REUSE_PORT", "RANGECACHE_SOCKET_REUSE_PORT"),
        ] {
            let error = check(name).unwrap_err();
            let text = error.to_string();
            assert!(
                text.contains(name) && text.contains(&format!("did you mean {nearest}?")),
                "{text}"
            );
        }
        let text = check("RANGECACHE_BOGUS").unwrap_err().to_string();
        assert!(
            !text.contains("did you mean") && text.contains("--help"),
            "{text}"
        );
        for name in [
            "RANGECACHE_ENDPOINTS",
            "RANGECACHE",
            "RANGE_CACHE_X",
            "RANGECACHE_TEST_FAULTS",
            "RANGECACHE_SERVICE_HOST",
            "RANGECACHE_SERVICE_PORT",
            "RANGECACHE_SERVICE_PORT_METRICS",
            "RANGECACHE_PORT_23790_TCP",
            "RANGECACHE_PORT_23790_TCP_ADDR",
            "RANGECACHE_EVENTS_PORT_23790_TCP_PROTO",
        ] {
            assert_eq!(check(name), Ok(()));
        }
        assert_eq!(with("RANGECACHE_PORT", "tcp://10.0.0.1:23790"), Ok(()));
    }

    #[test]
    fn settings_are_grouped_by_source() {
        let text = printed(&[
            "--cache-prefix",
            "/a/",
            "--cache-prefix",
            "/b c/",
            "--max-calls",
            "7",
        ]);
        let (given, defaults) = text.split_once("# Defaults\n").unwrap();
        assert!(
            given.contains("\nRANGECACHE_CACHE_PREFIX='/a/,/b c/'\n"),
            "{text}"
        );
        assert!(given.contains("\nRANGECACHE_MAX_CALLS=7\n"), "{text}");
        assert!(defaults.contains("RANGECACHE_ENDPOINTS=http://127.0.0.1:2379\n"));
        assert!(defaults.contains("\n# RANGECACHE_CACERT=\n"), "{text}");
        let flags = Config::command().get_opts().count();
        assert_eq!(text.matches("RANGECACHE_").count(), flags);
    }

    #[test]
    fn given_settings_are_flags_without_defaults_and_secrets() {
        let given = |flags: &[&str]| {
            let matches = Config::command()
                .try_get_matches_from(std::iter::once(&"rangecache").chain(flags))
                .unwrap();
            let config = Config::from_arg_matches(&matches).unwrap();
            given(&settings(&config, &matches, &BTreeSet::new()))
        };
        let text = given(&[
            "--max-calls",
            "7",
            "--user",
            "mirror:hidden",
            "--cache-prefix",
            "/b c/",
        ]);
        let mut flags: Vec<_> = text
            .split(" --")
            .map(|flag| flag.trim_start_matches("--"))
            .collect();
        flags.sort_unstable();
        assert_eq!(flags, ["cache-prefix='/b c/'", "max-calls=7", "user='(secret)'"]);
        assert_eq!(given(&[]), "");
    }

    #[test]
    fn secrets_are_masked() {
        let text = printed(&["--user", "mirror:hidden"]);
        assert!(text.contains("\n# RANGECACHE_USER=(secret)\n"), "{text}");
        assert!(!text.contains("hidden") && !text.contains("mirror:"));
    }

    #[test]
    fn printed_settings_can_be_parsed_again() {
        let text = printed(&["--history-max-age", "1m 30s", "--auto-tls", "--socket-reuse-port"]);
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let (name, value) = line.split_once('=').unwrap();
            let flag = name
                .trim_start_matches("RANGECACHE_")
                .to_lowercase()
                .replace('_', "-");
            let flag = format!("--{flag}={}", value.trim_matches('\''));
            if flag.starts_with("--socket-reuse-port") {
                assert_eq!(value, "true");
                continue;
            }
            let parsed = Config::command().try_get_matches_from(["rangecache", &flag]);
            assert!(parsed.is_ok(), "{flag}");
        }
    }
}
