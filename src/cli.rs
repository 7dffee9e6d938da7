//! The command line: which command, and its flags.
//!
//! Without a command rangecache serves, with the same flags as `serve`. Uses `config` and the flags of the other commands.

use std::io::{self, Write};
use std::{collections::BTreeSet, ffi::OsString, fmt::Display, path::PathBuf, process::ExitCode};

use clap::{ArgMatches, Args as _, Command, CommandFactory as _, FromArgMatches as _, error::ErrorKind};
use clap_complete::{Generator as _, Shell};
use rangecache_config::{
    Config, FlagsFile, FlagsFileError, Setting, check_names, effective, settings, summary, with_environment,
};

use rangecache_tools::running::{CtlConfig, HealthConfig, StatusConfig};
use rangecache_tools::static_pod::{StaticPodAction, StaticPodConfig};
use rangecache_tools::{diff::DiffConfig, doctor::DoctorConfig};

/// sysexits' EX_USAGE.
const MISUSE: u8 = 64;

/// The command that the command line names, with its flags.
#[derive(Debug)]
pub enum Task {
    /// Run the proxy.
    Serve(Box<Serving>),
    /// Examine etcd and report what serving would do.
    Doctor(Box<DoctorConfig>),
    /// Compare two endpoints.
    Diff(Box<DiffConfig>),
    /// Print the status of a rangecache that runs.
    Status(Box<StatusConfig>),
    /// Ask whether a rangecache runs, or is ready.
    Health(Box<HealthConfig>),
    /// Have a rangecache that runs do something.
    Ctl(Box<CtlConfig>),
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
    let matches = command().try_get_matches_from(&args).map_err(explained)?;
    let given = matches.subcommand().map_or(&matches, |(_, given)| given);
    // An error means that the command does not have the flag.
    let Ok(Some(path)) = given.try_get_one::<PathBuf>("flags_file") else {
        return Ok((matches, BTreeSet::new()));
    };
    let refused = |error| command().error(ErrorKind::ValueValidation, error);
    let file = FlagsFile::read(path).map_err(|error| match error {
        FlagsFileError::Unreadable { .. } => command().error(ErrorKind::Io, error),
        error => refused(error.to_string()),
    })?;
    let (more, names) = file.missing_in(given);
    let matches = command()
        .try_get_matches_from(args.into_iter().chain(more))
        .map_err(|error| refused(format!("--flags-file {}: {}", path.display(), summary(&error))))?;
    Ok((matches, names))
}

/// The error, with what to do if flags stand in front of the command.
fn explained(error: clap::Error) -> clap::Error {
    let text = error.to_string();
    // The flags may be in lines of their own.
    let lines = text.lines().take_while(|line| !line.is_empty());
    let first = lines.map(str::trim).collect::<Vec<_>>().join(" ");
    if error.kind() == ErrorKind::ArgumentConflict && first.contains("the subcommand") {
        let what = format!(
            "{}; write the flags behind the command",
            first.trim_start_matches("error: ")
        );
        return command().error(ErrorKind::ArgumentConflict, what);
    }
    error
}

impl Task {
    /// Reads the arguments and the environment of this process.
    ///
    /// # Errors
    /// The error in the arguments, or the help that they request, ready to be printed. What contradicts itself in the flags of
    /// serving is found here for every command but `serve`, which handles signals first.
    pub fn from_args() -> Result<Task, clap::Error> {
        let args: Vec<_> = std::env::args_os().collect();
        if asks_for_short_help(&args) {
            command()
                .override_help(SHORT_HELP)
                .try_get_matches_from(["rangecache", "-h"])?;
        }
        let (matches, of_file) = with_file(args)?;
        let task = Task::new(&matches, &of_file)?;
        if task.reads_environment() {
            let text = |text: OsString| text.to_string_lossy().into_owned();
            let variables = std::env::vars_os().map(|(name, value)| (text(name), text(value)));
            check_names(variables).map_err(|error| command().error(ErrorKind::UnknownArgument, error))?;
        }
        if let Some(config) = task.flags_to_check() {
            let refused = |error| command().error(ErrorKind::ValueValidation, error);
            config.validate().map_err(refused)?;
            config
                .check_files()
                .map_err(|error| command().error(ErrorKind::Io, error))?;
        }
        Ok(task)
    }

    /// Flags of serving that the command uses at once.
    fn flags_to_check(&self) -> Option<&Config> {
        match self {
            Task::Doctor(options) => Some(&options.config),
            Task::StaticPod(options) if options.action == StaticPodAction::Install => Some(&options.config),
            Task::Settings { config, .. } => Some(config),
            _ => None,
        }
    }

    /// Whether the settings of serving apply, which may come from the environment.
    fn reads_environment(&self) -> bool {
        !matches!(
            self,
            Task::Diff(_)
                | Task::Status(_)
                | Task::Health(_)
                | Task::Ctl(_)
                | Task::Completions(_)
                | Task::Man
        )
    }

    fn new(matches: &ArgMatches, of_file: &BTreeSet<String>) -> Result<Task, clap::Error> {
        match matches.subcommand() {
            Some(("completions", matches)) => match matches.get_one("shell") {
                Some(&shell) => Ok(Task::Completions(shell)),
                None => Err(command().error(ErrorKind::MissingRequiredArgument, "which shell?")),
            },
            Some(("man", _)) => Ok(Task::Man),
            Some(("doctor", matches)) => Ok(Task::Doctor(Box::new(DoctorConfig::from_arg_matches(matches)?))),
            Some(("diff", matches)) => Ok(Task::Diff(Box::new(DiffConfig::from_arg_matches(matches)?))),
            Some(("status", matches)) => Ok(Task::Status(Box::new(StatusConfig::from_arg_matches(matches)?))),
            Some(("health", matches)) => Ok(Task::Health(Box::new(HealthConfig::from_arg_matches(matches)?))),
            Some(("ctl", matches)) => Ok(Task::Ctl(Box::new(CtlConfig::from_arg_matches(matches)?))),
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

/// Prints the error in the arguments or in a file that they name, or the help that they request.
#[must_use]
pub fn explain(error: &clap::Error) -> ExitCode {
    // If even this cannot be printed, there is no other place to report it.
    let _ = error.print();
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => ExitCode::SUCCESS,
        // A file may be another one at the next start: systemd and others try again.
        ErrorKind::Io => ExitCode::FAILURE,
        _ => ExitCode::from(MISUSE),
    }
}

/// Prints what is wrong with the flags or the environment.
#[must_use]
pub fn misuse(error: impl Display) -> ExitCode {
    explain(&command().error(ErrorKind::ValueValidation, error))
}

/// Text of `-h`, which fits a screen; `--help` has every flag.
const SHORT_HELP: &str = "\
A transparent caching gRPC proxy in front of etcd

Usage: rangecache [FLAGS]              run the proxy
       rangecache COMMAND [FLAGS]

  doctor               examine etcd: what would be cached, in how much memory
  config               print the effective settings
  status, health, ctl  ask a rangecache that runs, and tell it what to do
  diff                 compare the keys of two endpoints
  static-pod           install or remove the manifest of a static pod
  completions, man     print shell completions, or the manual

Flags that are set most; rangecache --help has all:
  --endpoints URL,…               etcd [http://127.0.0.1:2379]
  --cacert, --cert, --key PATH    TLS to etcd
  --user NAME[:PASSWORD]          where etcd's auth is on
  --listen-client-urls URL,…      for clients [http://127.0.0.1:23790]
  --cert-file, --key-file PATH    TLS for clients; --trusted-ca-file for theirs
  --listen-metrics-urls URL,…     probes, metrics, page [http://127.0.0.1:23791]
  --cache-prefix PREFIX,…         what is mirrored [everything]
  --no-cache-prefix PREFIX,…      what is not
  --cache-max-bytes BYTES         memory for it [3/4 of limit, 1/4 of host]
  --log-level LEVEL               [info]
  --flags-file PATH               any of them, read again by a reload

Each is also a variable of the environment: RANGECACHE_ENDPOINTS and so on.
Example: rangecache --endpoints http://127.0.0.1:2379
";

/// Flags of serving that the short help of other commands has.
const COMMON_FLAGS: [&str; 10] = [
    "endpoints",
    "cacert",
    "cert",
    "key",
    "user",
    "listen-metrics-urls",
    "cache-prefix",
    "no-cache-prefix",
    "cache-max-bytes",
    "flags-file",
];

/// Text below the short help of a command that has the flags of serving.
const MORE_FLAGS: &str = "--help has every flag of serving, all of which apply.";

/// Whether the arguments ask for the short help of the whole program.
fn asks_for_short_help(args: &[OsString]) -> bool {
    match args {
        [_, only] => only == "-h",
        [_, serve, flag] => serve == "serve" && flag == "-h",
        _ => false,
    }
}

/// A command whose short help leaves out the flags of serving that are seldom set.
fn with_short_help(command: Command) -> Command {
    let own: Vec<_> = own_flags(&command).map(|flag| flag.get_id().clone()).collect();
    command
        .mut_args(|arg| {
            let is_common = arg.get_long().is_some_and(|name| COMMON_FLAGS.contains(&name));
            let is_shown = arg.is_positional() || is_common || own.contains(arg.get_id());
            arg.hide_short_help(!is_shown)
        })
        .after_help(MORE_FLAGS)
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
    rangecache doctor --endpoints https://etcd:2379 --cacert ca.crt \\\n    \
      --cert client.crt --key client.key --output json\n      \
    for scripts: the exit code, or .result, which is ok, warning or bad";

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
    rangecache diff --prefix /registry/ \\\n    \
      http://127.0.0.1:2379 http://127.0.0.1:23790\n      \
    what memory has, against etcd\n  \
    rangecache diff --prefix /registry/pods/ --revision 81234 --limit 5 \\\n    \
      http://a:2379 http://b:2379\n      \
    two members at a revision of the past, to find a corrupt one";

/// Text above the flags of `status`.
const STATUS: &str = "Print the status of a rangecache that runs: findings with remedies, mirrors, etcd's endpoints.\n\n\
    The exit code is 0 if it is ready and nothing is bad, 1 if not, 2 if it does not respond, and 64 for misuse.";

/// Text below the flags of `status`.
const STATUS_EXAMPLES: &str = "Examples:\n  \
    rangecache status\n  \
    kubectl exec -n kube-system rangecache-cp1 -- /rangecache status\n  \
    rangecache status --output json --metrics-url http://10.0.0.7:23791";

/// Text above the flags of `health`.
const HEALTH: &str = "Ask whether a rangecache runs, or with --ready whether memory answers.\n\n\
    The exit code is 0 if so, 1 if not, 2 if it does not respond, and 64 for misuse.";

/// Text above the flags of `ctl`.
const CTL: &str = "Have a rangecache that runs do something.\n\n\
    It accepts this from its own host, unless its --control says something else. The exit code is 0 if it was done, 1 if it was \
    refused, 2 if it does not respond, and 64 for misuse.";

/// Text below the flags of `ctl`.
const CTL_EXAMPLES: &str = "Examples:\n  \
    rangecache ctl forward-all\n      \
    in an incident: only etcd answers, until use-memory\n  \
    rangecache ctl reload\n      \
    after a change of the file of --flags-file";

/// Text above the flags of `static-pod`.
const STATIC_POD: &str = "Install the manifest of a static pod in the folder of the kubelet, remove it, or hold: wait for SIGTERM.\n\n\
    Takes the flags of serving that the manifest has. The manifest is written after `rangecache doctor` has passed with \
    them, beside the one before it, which goes once the new pod is ready by the first of --listen-metrics-urls. If it is not \
    within --ready-timeout, the new manifest goes, and the old pod was never touched. A pod that an apiserver of this node \
    uses is not removed.\n\n\
    The exit code is 0 if the pod is ready or the manifest was there already, 1 if not, and 64 for misuse.";

/// Text below the flags of `static-pod`.
const STATIC_POD_EXAMPLES: &str = "Examples:\n  \
    rangecache static-pod install --manifest \"$(cat rangecache.yaml)\" \\\n    \
      --endpoints https://127.0.0.1:2379 --cacert ca.crt \\\n    \
      --cert client.crt --key client.key\n  \
    rangecache static-pod remove";

/// Text above the flags of `config`.
const SETTINGS: &str = "Print the effective settings as environment variables, grouped by where they come from.\n\n\
    Takes the flags and the environment of serving, checks them, and exits with 64 if they are invalid. The output can \
    be used as an environment file; secrets are masked.";

/// The command without a sub-command, which serves.
fn serving_command() -> Command {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), " (commit ", env!("BUILD_COMMIT"), ")");
    with_environment(Config::command()).version(VERSION)
}

/// The whole command line.
#[must_use]
pub fn command() -> Command {
    let shell = clap::Arg::new("shell")
        .required(true)
        .value_name("SHELL")
        .value_parser(clap::value_parser!(Shell));
    // The description of a command is set last: its flags bring a description of their own.
    let serving = |name: &'static str| with_environment(Config::augment_args(Command::new(name)));
    serving_command()
        .args_conflicts_with_subcommands(true)
        .disable_help_subcommand(true)
        .subcommand(serving("serve").about("Run the proxy (default)"))
        .subcommand(
            with_short_help(with_environment(DoctorConfig::augment_args(Command::new(
                "doctor",
            ))))
            .about(DOCTOR_SUMMARY)
            .long_about(DOCTOR)
            .after_long_help(DOCTOR_EXAMPLES),
        )
        .subcommand(
            DiffConfig::augment_args(Command::new("diff"))
                .about("Compare the keys of two endpoints at one revision")
                .long_about(DIFF)
                .after_help(DIFF_EXAMPLES),
        )
        .subcommand(
            StatusConfig::augment_args(Command::new("status"))
                .about("Print the status of a rangecache that runs")
                .long_about(STATUS)
                .after_help(STATUS_EXAMPLES),
        )
        .subcommand(
            HealthConfig::augment_args(Command::new("health"))
                .about("Ask whether a rangecache runs, or is ready")
                .long_about(HEALTH),
        )
        .subcommand(
            CtlConfig::augment_args(Command::new("ctl"))
                .about("Have a rangecache that runs reload its flags, or switch memory off and on")
                .long_about(CTL)
                .after_help(CTL_EXAMPLES),
        )
        .subcommand(
            with_short_help(with_environment(StaticPodConfig::augment_args(Command::new(
                "static-pod",
            ))))
            .about("Install or remove the manifest of a static pod")
            .long_about(STATIC_POD)
            .after_long_help(STATIC_POD_EXAMPLES),
        )
        .subcommand(
            with_short_help(serving("config"))
                .about("Print the effective settings, secrets masked")
                .long_about(SETTINGS)
                .after_long_help("Example:\n  rangecache config --cache-prefix /registry/ > rangecache.env"),
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
    let page = clap_mangen::Man::new(serving_command());
    page.render_title(out)?;
    page.render_name_section(out)?;
    // Not with every flag, as clap has it: they are listed below.
    let synopsis = [
        r"\fBrangecache\fR [\fBserve\fR] [\fIFLAGS\fR]",
        r"\fBrangecache\fR \fICOMMAND\fR [\fIFLAGS\fR]",
    ];
    writeln!(out, ".SH SYNOPSIS\n{}", synopsis.join("\n.br\n"))?;
    page.render_description_section(out)?;
    page.render_options_section(out)?;
    // The commands have no pages of their own to refer to.
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
    out.write_all(include_bytes!("man.roff"))
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
    fn manual_has_the_sections_of_a_manual() {
        let mut page = Vec::new();
        man(&mut page).unwrap();
        let page = String::from_utf8(page).unwrap();
        let headings: Vec<_> = page
            .lines()
            .filter_map(|line| line.strip_prefix(".SH "))
            .collect();
        let order = ["NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS"];
        assert_eq!(headings[..4], order, "{headings:?}");
        for heading in [
            "COMMANDS",
            "ENVIRONMENT",
            "FILES",
            "SIGNALS",
            "\"EXIT STATUS\"",
            "EXAMPLES",
            "\"SEE ALSO\"",
        ] {
            assert!(headings.contains(&heading), "{heading} is not in {headings:?}");
        }
        let (_, synopsis) = page.split_once(".SH SYNOPSIS").unwrap();
        let (synopsis, _) = synopsis.split_once(".SH ").unwrap();
        assert!(synopsis.lines().count() < 8, "{synopsis}");
    }

    #[test]
    fn command_line_is_consistent() {
        command().debug_assert();
    }

    #[test]
    fn number_below_zero_is_refused_as_a_value() {
        let refused = task(&["--max-calls", "-1"]).unwrap_err().to_string();
        assert!(
            refused.contains("invalid value '-1' for '--max-calls"),
            "{refused}"
        );
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

    #[test]
    fn short_help_fits_a_screen_and_names_what_there_is() {
        assert!(SHORT_HELP.lines().count() <= 34, "{SHORT_HELP}");
        let commands = command();
        let names = |text: &str| -> BTreeSet<String> {
            let words = text.split([' ', ',', ';', '\n']);
            words.map(str::to_owned).collect()
        };
        let words = names(SHORT_HELP);
        for command in commands.get_subcommands().map(Command::get_name) {
            assert!(command == "serve" || words.contains(command), "{command}");
        }
        let flags: BTreeSet<_> = commands.get_opts().filter_map(clap::Arg::get_long).collect();
        for word in words.iter().filter_map(|word| word.strip_prefix("--")) {
            assert!(word == "help" || flags.contains(word), "--{word}");
        }
        for name in COMMON_FLAGS {
            assert!(flags.contains(name), "--{name}");
        }
        let asks = |args: &[&str]| asks_for_short_help(&args.iter().map(Into::into).collect::<Vec<_>>());
        assert!(asks(&["rangecache", "-h"]) && asks(&["rangecache", "serve", "-h"]));
        assert!(!asks(&["rangecache", "--help"]) && !asks(&["rangecache", "doctor", "-h"]));
    }

    #[test]
    fn examples_are_not_wrapped_in_a_terminal_of_80_columns() {
        let mut texts = vec![SHORT_HELP.to_owned()];
        for mut command in std::iter::once(command()).chain(command().get_subcommands().cloned()) {
            for help in [
                command.get_after_help().cloned(),
                command.get_after_long_help().cloned(),
            ] {
                texts.extend(help.map(|help| help.to_string()));
            }
            command.build();
        }
        for line in texts
            .iter()
            .flat_map(|text| text.lines())
            .filter(|line| line.starts_with("  "))
        {
            assert!(line.chars().count() <= 80, "{line}");
        }
    }

    #[test]
    fn flags_in_front_of_the_command_are_told_where_to_be() {
        let error = task(&["--cache-max-bytes", "1GiB", "config"]).unwrap_err();
        assert!(error.to_string().contains("behind the command"), "{error}");
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
