//! The command line: what to do, and the flags of doing it.
//!
//! `serve` is what is done without a command, and takes the same flags. Only `main` uses this room; it uses `config` and
//! `doctor`.

use std::io::{self, Write};

use clap::{ArgMatches, Args as _, Command, CommandFactory as _, FromArgMatches as _};
use clap_complete::{Generator as _, Shell};

use crate::config::Config;
use crate::doctor::Options;

/// What the command line asks for.
#[derive(Debug)]
pub enum Task {
    /// Serve.
    Serve(Box<Config>),
    /// Look at etcd, and say what serving would make of it.
    Doctor(Box<Options>),
    /// Print what teaches a shell to complete rangecache's flags.
    Completions(Shell),
    /// Print the manual page.
    Man,
}

impl Task {
    /// Reads this process's arguments and environment.
    ///
    /// # Errors
    /// What is wrong with them, or the help that they ask for, ready to be printed.
    pub fn from_args() -> Result<Task, clap::Error> {
        Task::new(&command().try_get_matches()?)
    }

    fn new(matches: &ArgMatches) -> Result<Task, clap::Error> {
        match matches.subcommand() {
            Some(("completions", matches)) => match matches.get_one("shell") {
                Some(&shell) => Ok(Task::Completions(shell)),
                None => Err(command().error(clap::error::ErrorKind::MissingRequiredArgument, "which shell?")),
            },
            Some(("man", _)) => Ok(Task::Man),
            Some(("doctor", matches)) => Ok(Task::Doctor(Box::new(Options::from_arg_matches(matches)?))),
            Some((_, matches)) => Ok(Task::Serve(Box::new(Config::from_arg_matches(matches)?))),
            None => Ok(Task::Serve(Box::new(Config::from_arg_matches(matches)?))),
        }
    }
}

/// What `doctor --help` says first.
const DOCTOR: &str = "Look at etcd, and say what would be cached, in how much memory, and what stands in the way.\n\n\
    It takes the flags and the environment of serving: put doctor in front of them. It reads a few values of each prefix to guess \
    their size, and counts keys at a fifth of one of etcd's cores at most; nothing is written, and no rangecache need run.\n\n\
    The exit code is 0 if rangecache would serve, warnings included, 1 if something is bad, and 64 for misuse.";

/// Below its flags.
const DOCTOR_EXAMPLES: &str = "Examples:\n  \
    rangecache doctor --endpoints http://127.0.0.1:2379\n      \
    what would be mirrored, and whether it fits\n  \
    rangecache doctor --endpoints https://etcd:2379 --cacert ca.crt --cert client.crt --key client.key --output json\n      \
    for a script, which looks at the exit code, or at .result: ok, warning or bad";

/// The whole command line.
#[must_use]
pub fn command() -> Command {
    let shell = clap::Arg::new("shell")
        .required(true)
        .value_name("SHELL")
        .value_parser(clap::value_parser!(Shell));
    Config::command()
        .args_conflicts_with_subcommands(true)
        .disable_help_subcommand(true)
        // What a command is about comes last: its flags bring a description of their own.
        .subcommand(
            Config::augment_args(Command::new("serve")).about("Serve; what is done without a command"),
        )
        .subcommand(
            Options::augment_args(Command::new("doctor"))
                .about("Look at etcd, and say what would be cached, in how much memory, and what stands in the way")
                .long_about(DOCTOR)
                .after_help(DOCTOR_EXAMPLES),
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
/// Those of writing.
pub fn completions(shell: Shell, out: &mut dyn Write) -> io::Result<()> {
    let mut command = command();
    command.set_bin_name("rangecache");
    command.build();
    shell.try_generate(&command, out)
}

/// The flags of `command` that serving does not have.
fn own_flags(command: &Command) -> impl Iterator<Item = &clap::Arg> {
    let serving = Config::command();
    command.get_opts().filter(move |flag| {
        !serving
            .get_opts()
            .any(|other| other.get_long() == flag.get_long())
    })
}

/// Writes the manual page, in roff.
///
/// # Errors
/// Those of writing.
pub fn man(out: &mut dyn Write) -> io::Result<()> {
    // The commands have no pages of their own to refer to.
    clap_mangen::Man::new(Config::command()).render(out)?;
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

    fn task(words: &[&str]) -> Result<Task, clap::Error> {
        Task::new(&command().try_get_matches_from(std::iter::once(&"rangecache").chain(words))?)
    }

    #[test]
    fn the_command_line_is_sound() {
        command().debug_assert();
    }

    #[test]
    fn serving_takes_its_flags_with_and_without_the_word() {
        let Ok(Task::Doctor(options)) = task(&["doctor", "--endpoints", "http://etcd:1", "--deep"]) else {
            panic!("no doctor");
        };
        assert_eq!(options.config.endpoints[0].to_string(), "http://etcd:1");
        assert!(options.deep);
        for words in [
            vec!["--endpoints", "http://etcd:1"],
            vec!["serve", "--endpoints", "http://etcd:1"],
        ] {
            let Ok(Task::Serve(config)) = task(&words) else {
                panic!("{words:?} does not serve");
            };
            assert_eq!(config.endpoints[0].to_string(), "http://etcd:1");
        }
        assert!(
            task(&["--endpoints", "http://etcd:1", "serve"]).is_err(),
            "flags of what?"
        );
        assert!(task(&["completions"]).is_err());
        assert!(task(&["completions", "tcsh"]).is_err());
    }

    /// Every flag is completed and explained.
    #[test]
    fn completions_and_manual_know_every_flag() {
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
        assert!(texts[0].contains("what stands in the way"));
        for flag in &flags {
            for text in &texts {
                // Fish writes a flag without its dashes.
                assert!(text.contains(flag.as_str()), "{flag} is not in\n{text}");
            }
        }
    }
}
