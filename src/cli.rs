//! The command line: what to do, and the flags of doing it.
//!
//! `serve` is what is done without a command, and takes the same flags. Only `main` uses this room; it uses `config`.

use std::io::{self, Write};

use clap::{ArgMatches, Args as _, Command, CommandFactory as _, FromArgMatches as _};
use clap_complete::{Generator as _, Shell};

use crate::config::Config;

/// What the command line asks for.
#[derive(Debug)]
pub enum Task {
    /// Serve.
    Serve(Box<Config>),
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
            Some((_, matches)) => Ok(Task::Serve(Box::new(Config::from_arg_matches(matches)?))),
            None => Ok(Task::Serve(Box::new(Config::from_arg_matches(matches)?))),
        }
    }
}

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
        .subcommand(Config::augment_args(
            Command::new("serve").about("Serve; what is done without a command"),
        ))
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
        for flag in Config::command().get_opts().filter_map(clap::Arg::get_long) {
            for text in &texts {
                // Fish writes a flag without its dashes.
                assert!(text.contains(flag), "{flag} is not in\n{text}");
            }
        }
    }
}
