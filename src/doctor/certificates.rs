//! Certificates of both sides: whom they are for, and until when.

use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::future::join_all;
use tokio::time::timeout;

use super::CALL_TIMEOUT;
use super::members::Member;
use super::report::{Area, Report};
use crate::config::Config;
use crate::tls::{Connector, Facts, look_at_file};

/// From when on an end is near.
const SOON: Duration = Duration::from_secs(30 * 24 * 3600);

/// The files that the flags name. What cannot be read is found by whoever opens it.
pub(super) fn ours(config: &Config, report: &mut Report) {
    let tls = &config.tls;
    let files: [(&'static str, &Option<PathBuf>); 4] = [
        ("cacert", &tls.cacert),
        ("cert", &tls.cert),
        ("cert-file", &tls.cert_file),
        ("trusted-ca-file", &tls.trusted_ca_file),
    ];
    for (flag, path) in files {
        if let Some(path) = path
            && let Ok(facts) = look_at_file(flag, path)
        {
            judge(&format!("--{flag} {}", path.display()), &facts, report);
        }
    }
    if tls.insecure_skip_tls_verify {
        report.warn(
            Area::Certificates,
            "--insecure-skip-tls-verify: any certificate is taken for etcd's",
            "for tests only: whoever is on the way reads and answers; give --cacert instead",
        );
    }
    if tls.auto_tls {
        report.warn(
            Area::Certificates,
            "--auto-tls: clients cannot tell who answers",
            "give --cert-file and --key-file",
        );
    }
}

/// What etcd's members show. Why a handshake failed is said with the endpoint.
pub(super) async fn theirs(members: &[Member], connector: &Connector, report: &mut Report) {
    let secure = members
        .iter()
        .filter(|member| member.url.tls && member.connection().is_some());
    let looks = secure.map(async |member| {
        let shown = timeout(CALL_TIMEOUT, connector.look_at_peer(&member.url)).await;
        (member, shown)
    });
    for (member, shown) in join_all(looks).await {
        if let Ok(Ok(Some(facts))) = shown {
            judge(&format!("{} shows a certificate", member.url), &facts, report);
        }
    }
    let any_tls = members.iter().any(|member| member.url.tls);
    if !any_tls && members.iter().any(|member| member.connection().is_some()) {
        report.good(
            Area::Certificates,
            "no TLS towards etcd: the endpoints are http:// or unix://",
        );
    }
}

fn judge(what: &str, facts: &Facts, report: &mut Report) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let now = i64::try_from(now.as_secs()).unwrap_or(i64::MAX);
    let left = facts.not_after_seconds - now;
    let names = match facts.names.as_slice() {
        [] => String::new(),
        names => format!(" for {}", names.join(", ")),
    };
    let until = day(facts.not_after_seconds);
    if left < 0 {
        report.bad(
            Area::Certificates,
            format!("{what}{names}: expired on {until}"),
            "renew it (and look at this machine's clock)",
        );
    } else if facts.not_before_seconds > now {
        report.bad(
            Area::Certificates,
            format!("{what}{names}: valid from {} only", day(facts.not_before_seconds)),
            "look at both machines' clocks",
        );
    } else if left < i64::try_from(SOON.as_secs()).unwrap_or(i64::MAX) {
        report.warn(
            Area::Certificates,
            format!("{what}{names}: valid until {until}, {} days more", left / 86_400),
            "renew it; a file that is replaced is picked up without a restart",
        );
    } else {
        report.good(Area::Certificates, format!("{what}{names}: valid until {until}"));
    }
}

fn day(seconds: i64) -> String {
    // Beyond the year 9999 it cannot be written; nobody will mind.
    let seconds = u64::try_from(seconds).unwrap_or(0).min(253_402_300_799);
    let at = UNIX_EPOCH + Duration::from_secs(seconds);
    let text = humantime::format_rfc3339_seconds(at).to_string();
    text.chars().take("2026-01-01".len()).collect()
}
