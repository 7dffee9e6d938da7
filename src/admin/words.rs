//! Numbers as people read them.

use std::fmt::{self, Display, Write};
use std::time::Duration;

/// `12,345`.
pub(super) fn count(n: u64) -> String {
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

/// `1 key`, `2 keys`.
pub(super) fn counted(n: u64, noun: &str) -> String {
    format!("{} {noun}{}", count(n), if n == 1 { "" } else { "s" })
}

/// `1.5 MiB`.
#[allow(clippy::cast_precision_loss, reason = "three digits are shown")]
pub(super) fn bytes(n: u64) -> String {
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

/// `0.25`, `31`, `12,345`: a rate per second.
pub(super) fn rate(value: f64) -> String {
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

/// `3.21 ms`.
pub(super) fn duration(time: Duration) -> String {
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

/// `2 d 3 h`, `4 min`, `12 s`: two units at most.
pub(super) fn long(time: Duration) -> String {
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

/// Text on its way into HTML, also into an attribute in quotes.
#[derive(Debug)]
pub(super) struct Escaped<T>(pub(super) T);

impl<T: Display> Display for Escaped<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(Escaping(f), "{}", self.0)
    }
}

/// As [`Escaped`], with flags such as `--cache-prefix` marked as code.
#[derive(Debug)]
pub(super) struct Marked<'a>(pub(super) &'a str);

impl Display for Marked<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rest = self.0;
        while let Some(at) = rest.find("--") {
            let (before, flag) = rest.split_at(at);
            let end = flag
                .find(|c: char| c != '-' && !c.is_ascii_alphanumeric())
                .unwrap_or(flag.len());
            write!(
                f,
                "{}<code class=\"flag\">{}</code>",
                Escaped(before),
                Escaped(&flag[..end])
            )?;
            rest = &flag[end..];
        }
        write!(f, "{}", Escaped(rest))
    }
}

struct Escaping<'a, 'b>(&'a mut fmt::Formatter<'b>);

impl Write for Escaping<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for character in text.chars() {
            match character {
                '<' => self.0.write_str("&lt;")?,
                '>' => self.0.write_str("&gt;")?,
                '&' => self.0.write_str("&amp;")?,
                '"' => self.0.write_str("&quot;")?,
                '\'' => self.0.write_str("&#39;")?,
                // Neither shown nor allowed in HTML.
                _ if character.is_control() => self.0.write_char('\u{fffd}')?,
                _ => self.0.write_char(character)?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers() {
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

    #[test]
    fn flags_are_marked() {
        assert_eq!(
            Marked("<Raise --a-b, or (--c)").to_string(),
            "&lt;Raise <code class=\"flag\">--a-b</code>, or (<code class=\"flag\">--c</code>)"
        );
    }

    #[test]
    fn nothing_escapes_from_a_text() {
        assert_eq!(
            Escaped("</p><script>'\"&\n").to_string(),
            "&lt;/p&gt;&lt;script&gt;&#39;&quot;&amp;\u{fffd}"
        );
    }
}
