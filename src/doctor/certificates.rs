//! Certificates of rangecache and of etcd: names and validity.

use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::future::join_all;
use tokio::time::timeout;

use super::client::CALL_TIMEOUT;
use super::members::Member;
use super::model::{Area, Report};
use crate::config::Config;
use rangecache_edge::tls::{CertificateFacts, Connector, look_at_file};

/// Remaining validity below which a certificate is reported.
const SOON: Duration = Duration::from_secs(30 * 24 * 3600);

/// Adds findings on the certificate files of the flags. Unreadable files are reported where they are opened for use.
pub(super) fn examine_files(config: &Config, report: &mut Report) {
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
            assess(&format!("--{flag} {}", path.display()), &facts, report);
        }
    }
    if tls.insecure_skip_tls_verify {
        report.warn(
            Area::Certificates,
            "--insecure-skip-tls-verify: etcd's certificate is not verified",
            "use --cacert instead: without verification, a host between rangecache and etcd can read and answer calls",
        );
    }
    if tls.auto_tls {
        report.warn(
            Area::Certificates,
            "--auto-tls: clients cannot verify the generated certificate",
            "set --cert-file and --key-file",
        );
    }
}

/// Adds findings on the certificates of etcd's members. A failed handshake is reported with its endpoint.
pub(super) async fn examine_members(members: &[Member], connector: &Connector, report: &mut Report) {
    let secure = members
        .iter()
        .filter(|member| member.url.tls && member.connection().is_some());
    let certificates = secure.map(async |member| {
        let shown = timeout(CALL_TIMEOUT, connector.look_at_peer(&member.url)).await;
        (member, shown)
    });
    for (member, shown) in join_all(certificates).await {
        if let Ok(Ok(Some(facts))) = shown {
            assess(&format!("{} shows a certificate", member.url), &facts, report);
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

fn assess(what: &str, facts: &CertificateFacts, report: &mut Report) {
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
            "renew it (and check this machine's clock)",
        );
    } else if facts.not_before_seconds > now {
        report.bad(
            Area::Certificates,
            format!(
                "{what}{names}: not valid before {}",
                day(facts.not_before_seconds)
            ),
            "check the clocks of both machines",
        );
    } else if left < i64::try_from(SOON.as_secs()).unwrap_or(i64::MAX) {
        report.warn(
            Area::Certificates,
            format!("{what}{names}: valid until {until}, {} more days", left / 86_400),
            "renew it; a replaced file is reloaded without a restart",
        );
    } else {
        report.good(Area::Certificates, format!("{what}{names}: valid until {until}"));
    }
}

fn day(seconds: i64) -> String {
    // The format ends with the year 9999.
    let seconds = u64::try_from(seconds).unwrap_or(0).min(253_402_300_799);
    let at = UNIX_EPOCH + Duration::from_secs(seconds);
    let text = humantime::format_rfc3339_seconds(at).to_string();
    text.chars().take("2026-01-01".len()).collect()
}
