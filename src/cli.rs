//! The command line: which command, and its flags.
//!
//! Without a command rangecache serves, with the same flags as `serve`. Uses `config` and the flags of the other commands.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fmt::Display;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{ArgMatches, Args as _, Command, CommandFactory as _, FromArgMatches as _};
use clap_complete::{Generator as _, Shell};

use crate::config::{
    Config, FlagsFile, Setting, check_names, effective, settings, summary, with_environment,
};
use crate::diff::DiffConfig;
use crate::doctor::DoctorConfig;
use crate::replay::ReplayConfig;
use crate::static_pod::{StaticPodAction, StaticPodConfig};

/// sysexits' EX_USAGE.
const MISUSE: u8 = 64;

/// The command that the command line names, with its flags.
#[derive(Debug)]
pub enum Task {
    /// Run the proxy.
    Serve(Box<Serving>),
    /// Examine etcd and report what serving would do.
    Doctor(Box<DoctorConfig>),
    /// Play the reads of an access log again.
    Replay(Box<ReplayConfig>),
    /// Compare two endpoints.
    Diff(Box<DiffConfig>),
    /// Install or remove the manifest of a static pod.
    StaticPod(Box<StaticPodConfig>),
    /// Print the effective settings.
    Settings {
        /// The settings.
        config: Box<Config>,
        /// The settings as environment variables.
        text: String,
    },
    /// Print shell completions.
    Completions(Shell),
    /// Print the manual page.
    Man,
}

/// Configuration of `rangecache serve`, with the source of each value.
#[derive(Clone, Debug)]
pub struct Serving {
    /// The flags.
    pub config: Config,
    /// Every flag with its value and where that comes from.
    pub settings: Vec<Setting>,
}

impl Serving {
    fn new(matches: &ArgMatches, of_file: &BTreeSet<String>) -> Result<Serving, clap::Error> {
        let config = Config::from_arg_matches(matches)?;
        let settings = settings(&config, matches, of_file);
        Ok(Serving { config, settings })
    }

    /// Reads the arguments and the environment of this process again, and the file of `--flags-file`.
    ///
    /// # Errors
    /// What is wrong with the file, or with it and the arguments together.
    pub fn again() -> Result<Serving, String> {
        match Task::from_args() {
            Ok(Task::Serve(serving)) => match serving.config.validate() {
                Ok(()) => Ok(*serving),
                Err(error) => Err(error.to_string()),
            },
            // Not reached: this process serves.
            Ok(_) => Err("the command line does not serve".to_owned()),
            Err(error) => Err(summary(&error)),
        }
    }
}

/// The matches of `args`, with the flags of the file of `--flags-file` in addition, and the names of these.
fn with_file(args: Vec<OsString>) -> Result<(ArgMatches, BTreeSet<String>), clap::Error> {
    let matches = command().try_get_matches_from(&args)?;
    let given = matches.subcommand().map_or(&matches, |(_, given)| given);
    // An error means that the command does not have the flag.
    let Ok(Some(path)) = given.try_get_one::<PathBuf>("flags_file") else {
        return Ok((matches, BTreeSet::new()));
    };
    let refused = |error| command().error(ErrorKind::ValueValidation, error);
    let file = FlagsFile::read(path).map_err(|error| refused(error.to_string()))?;
    let (more, names) = file.missing_in(given);
    let matches = command()
        .try_get_matches_from(args.into_iter().chain(more))
        .map_err(|error| refused(format!("--flags-file {}: {}", path.display(), summary(&error))))?;
    Ok((matches, names))
}

impl Task {
    /// Reads the arguments and the environment of this process.
    ///
    /// # Errors
    /// The error in the arguments, or the help that they request, ready to be printed. What contradicts itself in the flags of
    /// serving is found here for every command but `serve`, which handles signals first.
    pub fn from_args() -> Result<Task, clap::Error> {
        let (matches, of_file) = with_file(std::env::args_os().collect())?;
        let task = Task::new(&matches, &of_file)?;
        if task.reads_environment() {
            let text = |text: OsString| text.to_string_lossy().into_owned();
            let variables = std::env::vars_os().map(|(name, value)| (text(name), text(value)));
            check_names(variables).map_err(|error| command().error(ErrorKind::UnknownArgument, error))?;
        }
        if let Some(Err(error)) = task.flags_to_check().map(Config::validate) {
            return Err(command().error(ErrorKind::ValueValidation, error));
        }
        Ok(task)
    }

    /// Flags of serving that the command uses at once.
    fn flags_to_check(&self) -> Option<&Config> {
        match self {
            Task::Doctor(options) => Some(&options.config),
            Task::Replay(options) => Some(&options.config),
            Task::StaticPod(options) if options.action == StaticPodAction::Install => Some(&options.config),
            Task::Settings { config, .. } => Some(config),
            _ => None,
        }
    }

    /// Whether the settings of serving apply, which may come from the environment.
    fn reads_environment(&self) -> bool {
        !matches!(self, Task::Diff(_) | Task::Completions(_) | Task::Man)
    }

    fn new(matches: &ArgMatches, of_file: &BTreeSet<String>) -> Result<Task, clap::Error> {
        match matches.subcommand() {
            Some(("completions", matches)) => match matches.get_one("shell") {
                Some(&shell) => Ok(Task::Completions(shell)),
                None => Err(command().error(ErrorKind::MissingRequiredArgument, "which shell?")),
            },
            Some(("man", _)) => Ok(Task::Man),
            Some(("doctor", matches)) => Ok(Task::Doctor(Box::new(DoctorConfig::from_arg_matches(matches)?))),
            Some(("replay", matches)) => Ok(Task::Replay(Box::new(ReplayConfig::from_arg_matches(matches)?))),
            Some(("diff", matches)) => Ok(Task::Diff(Box::new(DiffConfig::from_arg_matches(matches)?))),
            Some(("static-pod", matches)) => Ok(Task::StaticPod(Box::new(
                StaticPodConfig::from_arg_matches(matches)?,
            ))),
            Some(("config", matches)) => {
                let serving = Serving::new(matches, of_file)?;
                let text = effective(&serving.settings);
                let config = Box::new(serving.config);
                Ok(Task::Settings { config, text })
            }
            Some((_, matches)) => Ok(Task::Serve(Box::new(Serving::new(matches, of_file)?))),
            None => Ok(Task::Serve(Box::new(Serving::new(matches, of_file)?))),
        }
    }
}

/// Prints the error in the arguments, or the help that they request.
#[must_use]
pub fn explain(error: &clap::Error) -> ExitCode {
    // If even this cannot be printed, there is no other place to report it.
    let _ = error.print();
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => ExitCode::SUCCESS,
        _ => ExitCode::from(MISUSE),
    }
}

/// Prints what is wrong with the flags, the environment or a file that they name.
#[must_use]
pub fn misuse(error: impl Display) -> ExitCode {
    explain(&command().error(ErrorKind::ValueValidation, error))
}

/// Summary of `doctor` in the list of commands.
const DOCTOR_SUMMARY: &str =
    "Examine etcd and report what would be cached, in how much memory, and what prevents it";

/// Text above the flags of `doctor`.
const DOCTOR: &str = "Examine etcd and report what would be cached, in how much memory, and what prevents it.\n\n\
    Takes the flags and the environment of serving: put doctor in front of them. It reads a few values of each \
    prefix to estimate their size, and counts keys with at most a fifth of one of etcd's cores; it writes nothing and \
    needs no running rangecache.\n\n\
    The exit code is 0 if rangecache would serve, warnings included, 1 if there is a problem, and 64 for misuse.";

/// Text below the flags of `doctor`.
const DOCTOR_EXAMPLES: &str = "Examples:\n  \
    rangecache doctor --endpoints http://127.0.0.1:2379\n      \
    what would be mirrored, and whether it fits\n  \
    rangecache doctor --endpoints https://etcd:2379 --cacert ca.crt --cert client.crt --key client.key \\\n      \
    --output json\n      \
    for scripts: the exit code, or .result, which is ok, warning or bad";

/// Text above the flags of `replay`.
const REPLAY: &str = "Play the reads of an access log again, and report their latencies.\n\n\
    Reads are sent to --endpoints at the recorded pace, whether earlier ones have been answered or not, or --speed \
    times faster. Writes and watches are never played: the report says how many lines were passed over. The access log \
    must have keys: record it with --access-log FILE --access-log-keys.\n\n\
    The exit code is 0 if every read was answered, 1 if any failed or there is nothing to play, and 64 for misuse.";

/// Text below the flags of `replay`.
const REPLAY_EXAMPLES: &str = "Examples:\n  \
    rangecache --endpoints http://etcd:2379 --access-log access.log --access-log-keys\n      \
    record, in front of the clients\n  \
    rangecache replay access.log --endpoints http://etcd:2379\n      \
    what the same reads cost without rangecache\n  \
    rangecache replay access.log --endpoints http://127.0.0.1:23790 --speed 10 --output json\n      \
    ten times the load through rangecache, for scripts\n\n\
    The flags of serving that describe the connection to etcd apply: --cacert, --cert, --key, --user and others.";

/// Text above the flags of `diff`.
const DIFF: &str = "Compare the keys of two endpoints at one revision, such as an etcd and a rangecache in front of it.\n\n\
    Both are read page by page in key order: every key with its value, revisions, version and lease. The keys that differ \
    are printed, as far as --limit permits; values never are. Each page is a linearizable read at the same past \
    revision, so that writes during the comparison do not matter, unless etcd compacts the revision. Clusters of their \
    own have revisions of their own: compare copies made by a restore, or use --revision.\n\n\
    Where etcd's auth is on, both endpoints must permit the reads to --user, or to the user that --cert names.\n\n\
    The exit code is 0 if all keys are equal, 1 if some differ, 2 if they cannot be compared or there are none, and 64 for misuse.";

/// Text below the flags of `diff`.
const DIFF_EXAMPLES: &str = "Examples:\n  \
    rangecache diff --prefix /registry/ http://127.0.0.1:2379 http://127.0.0.1:23790\n      \
    what memory has, against etcd\n  \
    rangecache diff --prefix /registry/pods/ --revision 81234 --limit 5 http://a:2379 http://b:2379\n      \
    two members at a revision of the past, to find a corrupt one";

/// Text above the flags of `static-pod`.
const STATIC_POD: &str = "Install the manifest of a static pod in the folder of the kubelet, remove it, or hold: wait for SIGTERM.\n\n\
    Takes the flags of serving that the manifest has. The manifest is written after `rangecache doctor` has passed with \
    them, and at once, so that the kubelet sees the whole text or the old one. If no process that was started afterwards is ready \
    within --ready-timeout, by the first of --listen-metrics-urls, the manifest before it comes back.\n\n\
    The exit code is 0 if the pod is ready or the manifest was there already, 1 if not, and 64 for misuse.";

/// Text below the flags of `static-pod`.
const STATIC_POD_EXAMPLES: &str = "Examples:\n  \
    rangecache static-pod install --manifest \"$(cat rangecache.yaml)\" --endpoints https://127.0.0.1:2379 \\\n      \
    --cacert ca.crt --cert client.crt --key client.key\n  \
    rangecache static-pod remove";

/// Text above the flags of `config`.
const SETTINGS: &str = "Print the effective settings as environment variables, grouped by where they come from.\n\n\
    Takes the flags and the environment of serving, checks them, and exits with 64 if they are invalid. The output can \
    be used as an environment file; secrets are masked.";

/// The whole command line.
#[must_use]
pub fn command() -> Command {
    let shell = clap::Arg::new("shell")
        .required(true)
        .value_name("SHELL")
        .value_parser(clap::value_parser!(Shell));
    // The description of a command is set last: its flags bring a description of their own.
    let serving = |name: &'static str| with_environment(Config::augment_args(Command::new(name)));
    with_environment(Config::command())
        .args_conflicts_with_subcommands(true)
        .disable_help_subcommand(true)
        .subcommand(serving("serve").about("Run the proxy (default)"))
        .subcommand(
            with_environment(DoctorConfig::augment_args(Command::new("doctor")))
                .about(DOCTOR_SUMMARY)
                .long_about(DOCTOR)
                .after_help(DOCTOR_EXAMPLES),
        )
        .subcommand(replay())
        .subcommand(
            DiffConfig::augment_args(Command::new("diff"))
                .about("Compare the keys of two endpoints at one revision")
                .long_about(DIFF)
                .after_help(DIFF_EXAMPLES),
        )
        .subcommand(
            with_environment(StaticPodConfig::augment_args(Command::new("static-pod")))
                .about("Install or remove the manifest of a static pod")
                .long_about(STATIC_POD)
                .after_help(STATIC_POD_EXAMPLES),
        )
        .subcommand(
            serving("config")
                .about("Print the effective settings, secrets masked")
                .long_about(SETTINGS)
                .after_help("Example:\n  rangecache config --cache-prefix /registry/ > rangecache.env"),
        )
        .subcommand(
            Command::new("completions")
                .about("Print shell completions, for example: source <(rangecache completions bash)")
                .arg(shell),
        )
        .subcommand(
            Command::new("man").about("Print the manual page, for example: rangecache man | man -l -"),
        )
}

/// `rangecache replay`, whose help has the flags that matter for it.
fn replay() -> Command {
    const HEADINGS: [&str; 4] = ["etcd", "TLS", "Replay", "Report"];
    let command = with_environment(ReplayConfig::augment_args(Command::new("replay")));
    let command = command.mut_args(|arg| {
        let is_shown = arg.is_positional() || arg.get_help_heading().is_some_and(|of| HEADINGS.contains(&of));
        arg.hide(!is_shown)
    });
    command
        .about("Play the reads of an access log again, and report their latencies")
        .long_about(REPLAY)
        .after_help(REPLAY_EXAMPLES)
}

/// Writes completions for `shell`.
///
/// # Errors
/// If writing fails.
pub fn completions(shell: Shell, out: &mut dyn Write) -> io::Result<()> {
    let mut command = command();
    command.set_bin_name("rangecache");
    command.build();
    shell.try_generate(&command, out)
}

/// Flags of `command` that serving does not have.
fn own_flags(command: &Command) -> impl Iterator<Item = &clap::Arg> {
    let serving = Config::command();
    command.get_opts().filter(move |flag| {
        !serving
            .get_opts()
            .any(|other| other.get_long() == flag.get_long())
    })
}

/// Writes the manual page in roff.
///
/// # Errors
/// If writing fails.
pub fn man(out: &mut dyn Write) -> io::Result<()> {
    // The commands have no pages of their own to refer to.
    clap_mangen::Man::new(with_environment(Config::command())).render(out)?;
    writeln!(out, ".SH COMMANDS")?;
    for command in command().get_subcommands() {
        let about = command.get_about().map(ToString::to_string).unwrap_or_default();
        writeln!(out, ".TP\n\\fB{}\\fR\n{about}", command.get_name())?;
        for flag in own_flags(command) {
            let (name, help) = (flag.get_long().unwrap_or_default(), flag.get_help());
            let help = help.map(ToString::to_string).unwrap_or_default();
            writeln!(out, ".RS\n.TP\n\\fB\\-\\-{name}\\fR\n{help}\n.RE")?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn task(args: &[&str]) -> Result<Task, clap::Error> {
        let (matches, of_file) = with_file(
            std::iter::once(&"rangecache")
                .chain(args)
                .map(Into::into)
                .collect(),
        )?;
        Task::new(&matches, &of_file)
    }

    #[test]
    fn command_line_is_consistent() {
        command().debug_assert();
    }

    #[test]
    fn serve_may_be_left_out() {
        let Ok(Task::Doctor(options)) = task(&["doctor", "--endpoints", "http://etcd:1", "--deep"]) else {
            panic!("not doctor");
        };
        assert_eq!(options.config.etcd.endpoints[0].to_string(), "http://etcd:1");
        assert!(options.deep);
        for args in [
            vec!["--endpoints", "http://etcd:1"],
            vec!["serve", "--endpoints", "http://etcd:1"],
        ] {
            let Ok(Task::Serve(serving)) = task(&args) else {
                panic!("{args:?} does not serve");
            };
            assert_eq!(serving.config.etcd.endpoints[0].to_string(), "http://etcd:1");
        }
        assert!(
            task(&["--endpoints", "http://etcd:1", "serve"]).is_err(),
            "flags before the command"
        );
        assert!(task(&["completions"]).is_err());
        assert!(task(&["completions", "tcsh"]).is_err());
    }

    /// Every flag is completed and explained.
    #[test]
    fn completions_and_manual_name_every_flag() {
        let mut page = Vec::new();
        man(&mut page).unwrap();
        // Roff writes a hyphen that must stay one as \-.
        let page = String::from_utf8(page).unwrap().replace("\\-", "-");
        assert!(
            page.contains(".TH rangecache 1") && page.contains("\\fBcompletions\\fR"),
            "{page}"
        );
        let mut texts = vec![page];
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let mut text = Vec::new();
            completions(shell, &mut text).unwrap();
            texts.push(String::from_utf8(text).unwrap());
        }
        let mut flags = Vec::new();
        for command in std::iter::once(&Config::command()).chain(command().get_subcommands()) {
            flags.extend(
                command
                    .get_opts()
                    .filter_map(clap::Arg::get_long)
                    .map(str::to_owned),
            );
        }
        assert!(flags.iter().any(|flag| flag == "deep"));
        assert!(texts[0].contains("what prevents it"));
        for flag in &flags {
            for text in &texts {
                // Fish writes a flag without its dashes.
                assert!(text.contains(flag.as_str()), "{flag} is not in\n{text}");
            }
        }
    }
}
