//! Certificates of rangecache and of etcd: names and validity.

use std::path::PathBuf;
use std::time::{Duration, UNIX_EPOCH};

use futures_util::future::join_all;
use tokio::time::timeout;

use super::members::{CALL_TIMEOUT, Member};
use super::model::Report;
use rangecache_base::unix_time;
use rangecache_config::Config;
use rangecache_edge::tls::{CertificateFacts, Connector, look_at_file};
use rangecache_report::{Finding, FindingId, Severity};

/// Seconds of a day, the remaining validity below which it is bad.
const DAY: i64 = 24 * 3600;
/// Days of validity below which a certificate is reported.
const SOON_DAYS: i64 = 30;

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
            assess(flag, &format!("--{flag} {}", path.display()), &facts, report);
        }
    }
    if tls.insecure_skip_tls_verify {
        let text = "--insecure-skip-tls-verify: etcd's certificate is not verified";
        report.find(FindingId::CertificateNotVerified, text);
    }
    if tls.auto_tls {
        let text = "--auto-tls: clients cannot verify the generated certificate";
        report.find(FindingId::CertificateGenerated, text);
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
            let url = member.url.to_string();
            assess(&url, &format!("{url} shows a certificate"), &facts, report);
        }
    }
    let any_tls = members.iter().any(|member| member.url.tls);
    if !any_tls && members.iter().any(|member| member.connection().is_some()) {
        let text = "no TLS towards etcd: the endpoints are http:// or unix://";
        report.find(FindingId::NoTls, text);
    }
}

fn assess(subject: &str, what: &str, facts: &CertificateFacts, report: &mut Report) {
    let now = unix_time::now_seconds();
    let left = facts.not_after_seconds - now;
    let names = match facts.names.as_slice() {
        [] => String::new(),
        names => format!(" for {}", names.join(", ")),
    };
    let until = day(facts.not_after_seconds);
    let (id, text) = if left < 0 {
        let text = format!("expired on {until} by this machine's clock");
        (FindingId::CertificateExpired, text)
    } else if facts.not_before_seconds > now {
        let from = day(facts.not_before_seconds);
        (
            FindingId::CertificateNotYetValid,
            format!("not valid before {from}"),
        )
    } else if left < SOON_DAYS * DAY {
        let text = format!("valid until {until}, {} more days", left / DAY);
        (FindingId::CertificateExpiresSoon, text)
    } else {
        (FindingId::CertificateValid, format!("valid until {until}"))
    };
    let finding = Finding::new(id, format!("{what}{names}: {text}")).about(subject);
    report.add(if id == FindingId::CertificateExpiresSoon && left < DAY {
        finding.with_severity(Severity::Bad)
    } else {
        finding
    });
}

fn day(seconds: i64) -> String {
    // The format ends with the year 9999.
    let seconds = u64::try_from(seconds).unwrap_or(0).min(253_402_300_799);
    let at = UNIX_EPOCH + Duration::from_secs(seconds);
    let text = humantime::format_rfc3339_seconds(at).to_string();
    text.chars().take("2026-01-01".len()).collect()
}
