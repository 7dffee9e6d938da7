//! Parts that several sections of the page share.

use std::time::SystemTime;

use maud::{Markup, PreEscaped, Render, html};

use super::charts::Chart;

/// Text with flags such as `--cache-prefix` marked as code.
#[derive(Debug)]
pub(super) struct Flags<'a>(pub(super) &'a str);

impl Render for Flags<'_> {
    fn render(&self) -> Markup {
        let mut pieces = Vec::new();
        let mut rest = self.0;
        while let Some(at) = rest.find("--") {
            let (before, flag) = rest.split_at(at);
            let end = flag
                .find(|c: char| c != '-' && !c.is_ascii_alphanumeric())
                .unwrap_or(flag.len());
            pieces.push((before, &flag[..end]));
            rest = &flag[end..];
        }
        html! {
            @for (before, flag) in pieces { (before) code.flag { (flag) } }
            (rest)
        }
    }
}

/// Remedy for the operator; nothing if `remedy` is empty.
pub(super) fn remedy(remedy: &str) -> Markup {
    html! {
        @if !remedy.is_empty() { p.remedy { b { "To do:" } " " (Flags(remedy)) } }
    }
}

/// Time of day; `at` is RFC 3339, in whole seconds, UTC.
pub(super) fn time(at: &str, class: &str) -> Markup {
    let clock = at
        .split_once('T')
        .map_or(at, |(_, clock)| clock.trim_end_matches('Z'));
    html! { time class=(class) datetime=(at) { (clock) " UTC" } }
}

/// Time of `at`, with its date unless that is the date of `now`, which is RFC 3339, in whole seconds, UTC.
pub(super) fn time_of(at: SystemTime, now: &str) -> Markup {
    let at = humantime::format_rfc3339_seconds(at).to_string();
    let date = |time: &str| time.split_once('T').map(|(date, _)| date.to_owned());
    html! {
        @if date(&at) != date(now) { (date(&at).unwrap_or_default()) " " }
        (time(&at, ""))
    }
}

/// Ratio in percent; 100 and 0 only if exact.
pub(super) fn percent(ratio: f64) -> String {
    match ratio * 100.0 {
        percent if (99.95..100.0).contains(&percent) => "99.9 %".to_owned(),
        percent if percent > 0.0 && percent < 0.05 => "< 0.1 %".to_owned(),
        percent => format!("{} %", format!("{percent:.1}").trim_end_matches(".0")),
    }
}

/// Section of the page with its heading.
#[derive(Debug)]
pub(super) struct Section {
    /// Id, for links and the style.
    pub(super) id: &'static str,
    /// Heading, and text of the link to the section.
    pub(super) title: &'static str,
    content: Markup,
}

impl Section {
    pub(super) fn new(id: &'static str, title: &'static str, content: Markup) -> Section {
        Section { id, title, content }
    }

    /// HTML of the section.
    #[cfg(test)]
    pub(super) fn render_whole(&self) -> String {
        self.render().into_string()
    }
}

impl Render for Section {
    fn render(&self) -> Markup {
        html! {
            section id=(self.id) aria-labelledby={ (self.id) "-title" } {
                h2 id={ (self.id) "-title" } { (self.title) }
                (self.content)
            }
        }
    }
}

/// Table with a row of titles above `rows`. It scrolls by itself on a narrow screen; `label` names it.
pub(super) fn table(label: &str, titles: impl IntoIterator<Item = &'static str>, rows: &Markup) -> Markup {
    html! {
        div.scroll tabindex="0" role="region" aria-label=(label) {
            table {
                thead {
                    tr { @for title in titles { th scope="col" { (title) } } }
                }
                tbody { (rows) }
            }
        }
    }
}

/// Item of a legend: the colour of `class`, its title, and a value, which may have an `id`.
pub(super) fn key(class: &str, title: &str, id: Option<&str>, value: &str) -> Markup {
    html! {
        li {
            span class={ "key " (class) } aria-hidden="true" {}
            (title) " " b id=[id] { (value) }
        }
    }
}

/// Links to the sections.
pub(super) fn links(sections: &[Section]) -> Markup {
    html! {
        nav #sections aria-label="Sections" {
            @for section in sections { a href={ "#" (section.id) } { (section.title) } " " }
        }
    }
}

/// Chart of all samples with the values at its edges and its axis of time.
pub(super) fn plot(chart: &Chart, value: impl Fn(f64) -> String) -> Markup {
    html! {
        figure {
            (PreEscaped(&chart.svg))
            figcaption aria-hidden="true" {
                span { "15 min ago" }
                span {
                    "peak " (value(chart.top))
                    @if chart.bottom > 0.0 { ", logarithmic from " (value(chart.bottom)) }
                }
                span { "now" }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_marked_and_text_is_escaped() {
        assert_eq!(
            Flags("<Raise --a-b, or (--c)").render().into_string(),
            "&lt;Raise <code class=\"flag\">--a-b</code>, or (<code class=\"flag\">--c</code>)"
        );
    }

    #[test]
    fn time_of_another_day_has_its_date() {
        let text = |at: &str| {
            let at = humantime::parse_rfc3339(at).unwrap();
            time_of(at, "2026-01-02T00:00:05Z").into_string()
        };
        assert!(text("2026-01-01T23:59:58Z").starts_with("2026-01-01 <time"));
        assert!(text("2026-01-02T00:00:01Z").starts_with("<time"));
    }

    #[test]
    fn percent_is_100_or_0_only_if_exact() {
        for (ratio, text) in [
            (0.0, "0 %"),
            (0.0001, "< 0.1 %"),
            (0.6, "60 %"),
            (0.9999, "99.9 %"),
            (1.0, "100 %"),
        ] {
            assert_eq!(percent(ratio), text);
        }
    }
}
