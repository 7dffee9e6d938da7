//! Sections of the page about the process itself: its figures, its certificates and its flags.

use maud::html;

use super::{parts::Section, state::pair};
use crate::status::model::{CertificateStatus, FlagStatus, Status};
use rangecache_report::format::{bytes, count};

/// Days before its expiry from which on a certificate is shown as a warning.
const FEW_DAYS: i64 = 30;

pub(super) fn process(status: &Status) -> Section {
    let process = &status.process;
    let figures = html! {
        dl.pairs {
            (pair("host", &status.host))
            @if let Some(pod) = &status.pod { (pair("pod", pod)) }
            (pair("process", &process.pid.to_string()))
            (pair("CPU time", &format!("{:.1} s", process.cpu_seconds)))
            (pair("memory", &bytes(process.resident_bytes)))
            (pair("open files", &count(process.open_files)))
            (pair("threads", &count(process.threads)))
        }
    };
    Section::new("process", "Process", figures)
}

pub(super) fn certificates(certificates: &[CertificateStatus]) -> Option<Section> {
    let list = html! {
        dl.pairs {
            @for certificate in certificates {
                div {
                    dt { code { "--" (certificate.flag) } " (" (certificate.side) ")" }
                    dd class=(class(certificate.days_left)) { (left(certificate.days_left)) }
                }
            }
        }
    };
    (!certificates.is_empty()).then(|| Section::new("certificates", "Certificates", list))
}

fn class(days_left: i64) -> &'static str {
    match days_left {
        ..0 => "bad",
        0..FEW_DAYS => "warning",
        _ => "good",
    }
}

fn left(days: i64) -> String {
    match days {
        ..0 => "expired".to_owned(),
        0 => "less than a day left".to_owned(),
        1 => "1 day left".to_owned(),
        days => format!("{} days left", count(days.unsigned_abs())),
    }
}

pub(super) fn flags(flags: &[FlagStatus]) -> Section {
    let is_given = |flag: &&FlagStatus| flag.source != "default";
    let table = |flags: &[&FlagStatus]| {
        html! {
            dl.pairs {
                @for flag in flags {
                    div {
                        dt { code { "--" (flag.flag) } @if is_given(flag) { " (" (flag.source) ")" } }
                        dd { code { (flag.value) } }
                    }
                }
            }
        }
    };
    let (given, defaults): (Vec<_>, Vec<_>) = flags.iter().partition(is_given);
    let content = html! {
        @if given.is_empty() { p.quiet { "Every flag has its default." } } @else { (table(&given)) }
        details {
            summary { "Defaults" }
            (table(&defaults))
        }
    };
    Section::new("flags", "Flags", content)
}
