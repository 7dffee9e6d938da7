//! Switches: flags that are on or off.

use clap::builder::BoolishValueParser;
use clap::{Arg, ArgAction};

/// Makes an argument a switch: `#[arg(long, switch())]` on a `bool`.
pub trait Switch {
    /// Accepts `--flag`, `--flag=true` and `--flag=false`, so that the environment and a file of flags can set it either way; off by
    /// default.
    #[must_use]
    fn switch(self) -> Self;
}

impl Switch for Arg {
    fn switch(self) -> Arg {
        self.action(ArgAction::Set)
            .value_parser(BoolishValueParser::new())
            .value_name("BOOL")
            .num_args(0..=1)
            .require_equals(true)
            .default_missing_value("true")
            .default_value("false")
    }
}
