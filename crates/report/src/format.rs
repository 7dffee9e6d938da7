//! Numbers, bytes, rates, durations and roles for people.

use std::time::Duration;

use rangecache_upstream::Role;

/// Count with thousands separators: `12,345`.
#[must_use]
pub fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Count with its noun: `1 key`, `2 keys`.
#[must_use]
pub fn counted(n: u64, noun: &str) -> String {
    format!("{} {noun}{}", count(n), if n == 1 { "" } else { "s" })
}

/// Bytes in three digits and a binary unit: `1.5 MiB`.
#[allow(clippy::cast_precision_loss, reason = "three digits are shown")]
#[must_use]
pub fn bytes(n: u64) -> String {
    let mut value = n as f64;
    let mut unit = "B";
    for larger in ["KiB", "MiB", "GiB", "TiB"] {
        if value < 1000.0 {
            break;
        }
        (value, unit) = (value / 1024.0, larger);
    }
    if unit == "B" {
        format!("{n} B")
    } else {
        format!("{} {unit}", three_digits(value))
    }
}

/// Rate per second, in up to three digits below 1,000: `0.25`, `31`, `12,345`.
#[must_use]
pub fn rate(value: f64) -> String {
    if value >= 1000.0 {
        #[allow(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "it is not negative"
        )]
        return count(value.round() as u64);
    }
    three_digits(value)
}

/// Duration in three digits: `3.21 ms`; from two minutes on as by [`long`].
#[must_use]
pub fn duration(time: Duration) -> String {
    let seconds = time.as_secs_f64();
    if seconds >= 120.0 {
        return long(time);
    }
    let (value, unit) = match seconds {
        _ if seconds >= 1.0 => (seconds, "s"),
        _ if seconds >= 0.001 => (seconds * 1e3, "ms"),
        _ => (seconds * 1e6, "µs"),
    };
    format!("{} {unit}", three_digits(value))
}

/// Duration in whole seconds, in two units at most: `2 d 3 h`, `4 min`, `12 s`.
#[must_use]
pub fn long(time: Duration) -> String {
    let seconds = time.as_secs();
    let parts = [
        (seconds / 86_400, "d"),
        (seconds / 3600 % 24, "h"),
        (seconds / 60 % 60, "min"),
        (seconds % 60, "s"),
    ];
    let mut shown = parts
        .iter()
        .skip_while(|(n, _)| *n == 0)
        .take(2)
        .filter(|(n, _)| *n > 0);
    let Some((n, unit)) = shown.next() else {
        return "0 s".to_owned();
    };
    shown.fold(format!("{n} {unit}"), |text, (n, unit)| {
        format!("{text} {n} {unit}")
    })
}

/// Name of a member's role, also in JSON.
#[must_use]
pub fn role(role: Role) -> &'static str {
    match role {
        Role::Unknown => "unknown",
        Role::Leader => "leader",
        Role::Follower => "follower",
        Role::Learner => "learner",
        Role::Leaderless => "no_leader",
    }
}

fn three_digits(value: f64) -> String {
    let decimals = match value {
        _ if value < 0.005 => return "0".to_owned(),
        _ if value >= 99.95 => 0,
        _ if value >= 9.995 => 1,
        _ => 2,
    };
    let text = format!("{value:.decimals$}");
    match text.split_once('.') {
        Some(_) => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_three_digits_and_a_unit() {
        for (n, text) in [(0, "0"), (999, "999"), (1000, "1,000"), (1_234_567, "1,234,567")] {
            assert_eq!(count(n), text);
        }
        for (n, text) in [
            (0, "0 B"),
            (999, "999 B"),
            (1000, "0.98 KiB"),
            (1536, "1.5 KiB"),
            (100 << 20, "100 MiB"),
            (3 << 40, "3 TiB"),
        ] {
            assert_eq!(bytes(n), text);
        }
        for (value, text) in [
            (0.0, "0"),
            (0.25, "0.25"),
            (31.04, "31"),
            (999.4, "999"),
            (12_345.6, "12,346"),
        ] {
            assert_eq!(rate(value), text);
        }
        for (micros, text) in [
            (0, "0 µs"),
            (11, "11 µs"),
            (3_210, "3.21 ms"),
            (40_000, "40 ms"),
            (1_500_000, "1.5 s"),
            (300_000_000, "5 min"),
        ] {
            assert_eq!(duration(Duration::from_micros(micros)), text);
        }
        for (seconds, text) in [
            (0, "0 s"),
            (59, "59 s"),
            (61, "1 min 1 s"),
            (3600, "1 h"),
            (90_061, "1 d 1 h"),
        ] {
            assert_eq!(long(Duration::from_secs(seconds)), text);
        }
    }
}
