//! What an operator should know at once: what is wrong, what it means, what to do.

use serde::Serialize;

use super::advice;
use super::budgets::Budget;
use super::status::{Endpoint, Mirror};
use super::words::{bytes, count, counted};
use crate::mirror::cluster_state::Auth;
use crate::telemetry::Reason;
use crate::upstream::{Version, gates};

/// How much it matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Severity {
    /// All is as it should be.
    Good,
    /// Worth knowing; it passes, or is meant so.
    Note,
    /// Answers are right, but slower than they need to be.
    Warning,
    /// Clients suffer, or something must be looked into.
    Bad,
}

/// Something that is to be said.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Finding {
    pub(super) severity: Severity,
    /// One sentence.
    pub(super) title: String,
    pub(super) meaning: String,
    /// Empty where there is nothing to do.
    pub(super) remedy: String,
}

/// What findings are made from.
#[derive(Debug)]
pub(super) struct Seen<'a> {
    pub(super) draining: bool,
    pub(super) mirrors: &'a [Mirror],
    pub(super) endpoints: &'a [Endpoint],
    pub(super) budgets: &'a [Budget],
    /// The lowest among the endpoints.
    pub(super) version: Option<Version>,
    pub(super) auth: Auth,
    pub(super) has_own_user: bool,
    /// Why rangecache's own user does not do.
    pub(super) user_problem: Option<String>,
    pub(super) panics: u64,
    /// Reads refused in the last quarter of an hour.
    pub(super) shed: u64,
}

/// The worst first. If there are none, all is well.
pub(super) fn find(seen: &Seen<'_>) -> Vec<Finding> {
    let mut found = Vec::new();
    if seen.draining {
        found.push(Finding::new(
            Severity::Note,
            "rangecache is stopping",
            "No new calls are taken; those under way may finish.",
            "",
        ));
    }
    endpoints(seen, &mut found);
    gates(seen, &mut found);
    for mirror in seen.mirrors {
        of_mirror(mirror, seen, &mut found);
    }
    if seen.panics > 0 {
        found.push(Finding::new(
            Severity::Bad,
            format!("{} since the start", counted(seen.panics, "panic")),
            "Each cost one call or one restart of a task, and is a bug.",
            "Please report it, with the place that the log names.",
        ));
    }
    if seen.shed > 0 {
        found.push(Finding::new(
            Severity::Bad,
            format!("{} refused in the last 15 minutes", counted(seen.shed, "read")),
            "Memory could not answer, and a bound was reached. Clients may try again.",
            "See which bound below, and why memory could not answer.",
        ));
    }
    for budget in seen.budgets.iter().filter(|budget| budget.is_nearly_used_up()) {
        found.push(Finding::new(
            Severity::Warning,
            format!("{}: {:.0} % of the bound", budget.name, budget.ratio * 100.0),
            budget.at_the_bound,
            format!("Raise --{}, or find out who needs so much.", budget.flag),
        ));
    }
    found.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
    found
}

impl Finding {
    fn new(
        severity: Severity,
        title: impl Into<String>,
        meaning: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Finding {
        Finding {
            severity,
            title: title.into(),
            meaning: meaning.into(),
            remedy: remedy.into(),
        }
    }
}

fn endpoints(seen: &Seen<'_>, found: &mut Vec<Finding>) {
    if !seen.endpoints.iter().any(|endpoint| endpoint.is_connected) {
        let errors: Vec<_> = seen
            .endpoints
            .iter()
            .map(|endpoint| endpoint.last_error.as_str())
            .collect();
        found.push(Finding::new(
            Severity::Bad,
            "etcd cannot be reached",
            format!(
                "Calls wait up to --connect-timeout for a connection and then fail with Unavailable. {}",
                errors.join("; ")
            ),
            "See whether etcd runs, whether --endpoints names it, and whether certificates and the network let \
             rangecache through.",
        ));
        return;
    }
    for endpoint in seen.endpoints {
        if !endpoint.is_connected {
            found.push(Finding::new(
                Severity::Warning,
                format!("{} is not connected", endpoint.url),
                format!("Calls go to the others. {}", endpoint.last_error),
                "See whether that member runs and can be reached.",
            ));
        } else if !endpoint.is_healthy {
            found.push(Finding::new(
                Severity::Warning,
                format!("{} is unwell", endpoint.url),
                "It does not serve, has no leader or does not vote. Calls go to the others while there are any.",
                "Look at that member: etcdctl endpoint status --cluster.",
            ));
        }
    }
    if seen.version.is_none() {
        let advice = advice::of_reason(Reason::VersionUnknown);
        found.push(Finding::new(
            Severity::Note,
            advice.meaning,
            "Until then every read goes to etcd.",
            advice.remedy,
        ));
    }
}

fn gates(seen: &Seen<'_>, found: &mut Vec<Finding>) {
    if let Some(version) = seen.version
        && !gates::PROGRESS_NOTIFICATIONS.is_open(version)
    {
        let advice = advice::of_reason(Reason::VersionGate);
        found.push(Finding::new(
            Severity::Warning,
            format!("etcd {version} is too old for linearizable reads from memory"),
            advice.meaning,
            advice.remedy,
        ));
    }
    if let Some(problem) = &seen.user_problem {
        found.push(Finding::new(
            Severity::Warning,
            "rangecache's own user cannot read what is mirrored",
            problem,
            "",
        ));
    } else if seen.auth == Auth::On && !seen.has_own_user {
        found.push(Finding::new(
            Severity::Warning,
            "etcd's auth is on and rangecache has no user of its own",
            "Nothing can be mirrored, and every read goes to etcd.",
            "Give rangecache a user that may read what is mirrored: --user, with --password or --password-file.",
        ));
    }
}

fn of_mirror(mirror: &Mirror, seen: &Seen<'_>, found: &mut Vec<Finding>) {
    let name = &mirror.name;
    if mirror.mismatches > 0 {
        let advice = advice::of_reason(Reason::Mismatch);
        found.push(Finding::new(
            Severity::Bad,
            format!("{name} has differed from etcd"),
            format!(
                "Verification found it {}, and had it loaded anew.",
                times(mirror.mismatches)
            ),
            advice.remedy,
        ));
    }
    let is_reached = seen.endpoints.iter().any(|endpoint| endpoint.is_connected);
    let reason = match mirror.reason {
        // What follows from an etcd that cannot be reached goes without saying.
        Some(Reason::FeedLost | Reason::Loading) if !is_reached => return,
        Some(reason) => reason,
        None => return,
    };
    let advice = advice::of_reason(reason);
    let (severity, more) = match reason {
        Reason::Loading => (
            Severity::Note,
            format!(
                " So far: {}, {}.",
                counted(mirror.load_keys, "key"),
                bytes(mirror.load_bytes)
            ),
        ),
        Reason::OverBudget => {
            let bound = seen
                .budgets
                .iter()
                .find(|budget| budget.flag == "cache-max-bytes");
            let bound = bound.map_or(String::new(), |budget| format!(" of {}", bytes(budget.limit)));
            let more = format!(
                " When it was loaded last, {} with {} had come before the bound{bound} was reached.",
                counted(mirror.load_keys, "key"),
                bytes(mirror.load_bytes)
            );
            (Severity::Warning, more)
        }
        _ => (Severity::Warning, String::new()),
    };
    found.push(Finding::new(
        severity,
        format!("{name} is not answered from memory: {}", advice.title),
        format!("{}{more} Its reads go to etcd.", advice.meaning),
        advice.remedy,
    ));
}

fn times(n: u64) -> String {
    match n {
        1 => "once".to_owned(),
        n => format!("{} times", count(n)),
    }
}
