//! The page: the status as HTML. The script only requests the page again and updates what has changed; without it the
//! page shows the same.
//!
//! | file | subject |
//! |---|---|
//! | `reads` | reads: rates and sources, why not from memory, the slowest |
//! | `state` | mirrors, endpoints, bounds and gates |
//! | `charts` | charts as SVG |
//! | `parts` | parts that several sections share |
//!
//! No name comes from a client: mirrors are named by the operator's prefixes, and the status has no key and no value
//! (I10). Every text is escaped nevertheless, by `maud`.

mod charts;
mod parts;
mod reads;
mod state;

use std::time::Duration;

use maud::{Markup, html};

use super::status::model::Status;
use crate::diagnosis::format::long;
use crate::diagnosis::{Finding, Severity};
use parts::{Flags, remedy, section, time};

/// Style, at `/page.css`.
pub(super) const CSS: &str = include_str!("page.css");
/// Script, at `/page.js`.
pub(super) const JS: &str = include_str!("page.js");
/// Permits only this page's own files, and no frame around it.
pub(super) const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; \
     connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

const SHELL: &str = include_str!("page.html");
/// Position of the status in the shell.
const PLACEHOLDER: &str = "<!-- status -->";

/// The whole page.
pub(super) fn render(status: &Status) -> String {
    let main = html! {
        (heading(status))
        (findings(&status.findings))
        (reads::reads(status))
        (reads::reasons(status))
        (reads::slowest(&status.slowest))
        (state::mirrors(status))
        (state::endpoints(&status.endpoints))
        (state::budgets(&status.budgets))
        (state::gates(&status.gates))
    };
    SHELL.replacen(PLACEHOLDER, &main.into_string(), 1)
}

fn heading(status: &Status) -> Markup {
    let worst = status.findings.first();
    let severity = worst.map_or(Severity::Good, |finding| finding.severity);
    let headline = match severity {
        Severity::Good => "All is well.",
        Severity::Note => "All is well, with a note.",
        Severity::Warning => "Slower than it could be.",
        Severity::Bad => "Something is wrong.",
    };
    let mirrors = status.mirrors.iter();
    let in_service = mirrors.filter(|mirror| mirror.reason.is_none()).count();
    let mirrors = match (in_service, status.mirrors.len()) {
        (1, 1) => "The mirror is in service.".to_owned(),
        (0, 1) => "The mirror is out of service.".to_owned(),
        (n, all) if n == all => format!("All {all} mirrors are in service."),
        (0, all) => format!("All {all} mirrors are out of service."),
        (n, all) => format!("{n} of {all} mirrors are in service."),
    };
    html! {
        section #headline class={ "headline " (severity.as_str()) } {
            p role="status" { strong { (headline) } " " (mirrors) }
            p.quiet {
                "rangecache " (status.version) " · up " (long(Duration::from_secs(status.uptime_seconds)))
                " · as of " (time(&status.at, "at"))
            }
        }
    }
}

fn findings(findings: &[Finding]) -> Markup {
    if findings.is_empty() {
        return html! {};
    }
    let list = html! {
        ul.findings {
            @for finding in findings {
                li class={ "finding " (finding.severity.as_str()) } {
                    span.sign aria-hidden="true" { (sign(finding.severity)) }
                    div {
                        h3 { (finding.title) }
                        p { (Flags(&finding.meaning)) }
                        (remedy(&finding.remedy))
                    }
                }
            }
        }
    };
    section("findings", "What to know", &list)
}

/// Sign of a severity, so that colour is not the only distinction.
fn sign(severity: Severity) -> &'static str {
    match severity {
        Severity::Good => "✓",
        Severity::Note => "i",
        Severity::Warning => "!",
        Severity::Bad => "✕",
    }
}
