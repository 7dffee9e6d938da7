//! Findings that both the page and `doctor` report.

use super::finding::{Finding, Severity};
use super::reasons;
use rangecache_base::telemetry::Reason;
use rangecache_upstream::{ClusterOfEndpoint, UserProblem};

/// Finding for an etcd with auth on while `--user` is not set.
#[must_use]
pub fn no_own_user() -> Finding {
    Finding::new(
        Severity::Warning,
        "etcd's auth is on and rangecache has no user of its own (--user)",
        "Nothing can be mirrored, and every read is forwarded.",
        "Set --user and --password-file to a user that may read what is mirrored; docs/security.md has the commands.",
    )
}

/// Finding for a user of `--user` that etcd rejects, or that lacks a permission.
#[must_use]
pub fn user_problem(problem: &UserProblem) -> Finding {
    let remedy = problem.remedy();
    let mut remedy_sentence = remedy[..1].to_uppercase();
    remedy_sentence.push_str(&remedy[1..]);
    remedy_sentence.push('.');
    Finding::new(
        Severity::Warning,
        problem.to_string(),
        "Nothing that needs this user is mirrored, and those reads are forwarded.",
        remedy_sentence,
    )
}

/// Finding for endpoints that lead to different clusters; `None` if `mixed` is empty.
#[must_use]
pub fn different_clusters(mixed: &[ClusterOfEndpoint]) -> Option<Finding> {
    if mixed.is_empty() {
        return None;
    }
    let list: Vec<_> = mixed.iter().map(ToString::to_string).collect();
    Some(Finding::new(
        Severity::Bad,
        "the endpoints lead to different clusters",
        format!(
            "The one that most of them lead to is used, and the others are left out: {}.",
            list.join(", ")
        ),
        "Name the members of one cluster in --endpoints, and correct what is behind the name.",
    ))
}

/// Finding while no endpoint has reported its version.
#[must_use]
pub fn version_unknown() -> Finding {
    let explanation = reasons::explain_reason(Reason::VersionUnknown);
    Finding::new(
        Severity::Note,
        explanation.meaning.trim_end_matches('.'),
        "Until then every read is forwarded.",
        explanation.remedy,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_problems_are_findings_with_a_remedy_in_whole_sentences() {
        let problem = UserProblem::Rejected {
            user: "mirror".to_owned(),
            message: "authentication failed".to_owned(),
        };
        let finding = user_problem(&problem);
        assert!(
            finding
                .title
                .contains("does not accept the user \"mirror\" of --user: authentication failed"),
            "{finding:?}"
        );
        assert!(
            finding.remedy.starts_with("Fix the user") && finding.remedy.ends_with('.'),
            "{finding:?}"
        );
    }
}
