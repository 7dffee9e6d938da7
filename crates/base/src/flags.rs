//! Common parts of the flags of all rooms: flags that a reload replaces, flags that are on or off, and parsers of durations, sizes,
//! shares and modes. A leaf.

use std::{sync::Arc, time::Duration};

use arc_swap::{ArcSwap, Guard};
use clap::{Arg, ArgAction, builder::BoolishValueParser};

/// The current flags of a room, as the last reload has left them. Cloning it copies a reference.
#[derive(Debug)]
pub struct Live<T>(Arc<ArcSwap<T>>);

impl<T> Clone for Live<T> {
    fn clone(&self) -> Live<T> {
        Live(Arc::clone(&self.0))
    }
}

impl<T> Live<T> {
    /// The flags of the start.
    pub fn new(flags: T) -> Live<T> {
        Live(Arc::new(ArcSwap::from_pointee(flags)))
    }

    /// The flags of now.
    #[must_use]
    pub fn load(&self) -> Guard<Arc<T>> {
        self.0.load()
    }

    /// The flags of now, for longer than a moment.
    #[must_use]
    pub fn load_full(&self) -> Arc<T> {
        self.0.load_full()
    }

    /// Replaces the flags.
    pub fn store(&self, flags: T) {
        self.0.store(Arc::new(flags));
    }
}

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

/// Parses `500ms`, `3s` or `5m`.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text)
        .map_err(|error| format!("{error}; write a number and a unit, for example 500ms, 3s or 10m"))
}

/// Parses `1073741824`, `512MiB`, `512Mi` or `2G`. All units are powers of 1024.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let shift = match unit.trim_end_matches('B').trim_end_matches('i') {
        "" => 0,
        "K" | "k" => 10,
        "M" => 20,
        "G" => 30,
        "T" => 40,
        _ => {
            return Err(
                "write a number of bytes with an optional unit, for example 512MiB or 2Gi".to_owned(),
            );
        }
    };
    let number: u64 = number
        .parse()
        .map_err(|_| "write a number of bytes, for example 512MiB or 2Gi".to_owned())?;
    number
        .checked_mul(1 << shift)
        .ok_or_else(|| "the size does not fit into 64 bits".to_owned())
}

/// Parses a share from 0 to 1.
pub fn parse_share(text: &str) -> Result<f64, String> {
    text.parse()
        .ok()
        .filter(|share| (0.0..=1.0).contains(share))
        .ok_or_else(|| "write a number from 0 to 1, for example 0.01 for one in a hundred".to_owned())
}

/// Parses an octal file mode: `0600` or `600`.
pub fn parse_mode(text: &str) -> Result<u32, String> {
    u32::from_str_radix(text.trim_start_matches("0o"), 8)
        .ok()
        .filter(|mode| *mode <= 0o777)
        .ok_or_else(|| "write an octal mode, for example 0600 or 0660".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_binary_units() {
        for (text, bytes) in [
            ("0", 0),
            ("1024", 1024),
            ("1Ki", 1024),
            ("1k", 1024),
            ("3MiB", 3 << 20),
            ("2G", 2 << 30),
        ] {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
        for text in [
            "",
            "MiB",
            "5 apples",
            "-1",
            "99999999999999999999",
            "17179869184G",
        ] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
    }

    #[test]
    fn shares_are_between_0_and_1() {
        for (text, share) in [("0", 0.0), ("0.25", 0.25), ("1", 1.0)] {
            assert_eq!(parse_share(text), Ok(share), "{text}");
        }
        for text in ["", "-0.1", "1.1", "NaN", "inf", "1%"] {
            assert!(parse_share(text).is_err(), "{text}");
        }
    }

    #[test]
    fn durations_need_a_unit() {
        assert_eq!(parse_duration("1m 30s"), Ok(Duration::from_secs(90)));
        let error = parse_duration("3").unwrap_err();
        assert!(error.contains("a number and a unit"), "{error}");
    }

    #[test]
    fn modes_are_octal_and_without_special_bits() {
        assert_eq!(parse_mode("0660"), Ok(0o660));
        assert_eq!(parse_mode("600"), Ok(0o600));
        assert!(parse_mode("0999").is_err());
        assert!(parse_mode("7777").is_err());
    }
}
