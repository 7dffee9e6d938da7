//! The section of the page about what has changed last.

use maud::{Markup, html};
use rangecache_base::telemetry::Reason;
use rangecache_base::telemetry::state_changes::{ChangeKind, StateChange};
use rangecache_upstream::EndpointSource;

use super::parts::{Section, time_of};
use rangecache_report::{format::counted, reasons::explain_reason};

/// Changes that are shown without opening the rest.
const SHOWN: usize = 6;

/// The newest changes; `now` is the time of the status. Of a member that comes and goes the newest one stands for all.
pub(super) fn changes(changes: &[StateChange], now: &str) -> Option<Section> {
    let mut groups: Vec<(&StateChange, Vec<&StateChange>)> = Vec::new();
    for change in changes {
        let same = groups.iter_mut().find(|(newest, _)| {
            is_of_member(newest) && is_of_member(change) && newest.subject == change.subject
        });
        match same {
            Some((_, earlier)) => earlier.push(change),
            None => groups.push((change, Vec::new())),
        }
    }
    let (shown, more) = groups.split_at(groups.len().min(SHOWN));
    let list = |groups: &[(&StateChange, Vec<&StateChange>)]| {
        html! { ol.changes { @for (newest, earlier) in groups { (item(newest, earlier, now)) } } }
    };
    let content = html! {
        (list(shown))
        @if !more.is_empty() {
            details { summary { (more.len()) " earlier" } (list(more)) }
        }
    };
    (!changes.is_empty()).then(|| Section::new("changes", "What changed last", content))
}

fn is_of_member(change: &StateChange) -> bool {
    use ChangeKind::{MemberHealthy, MemberLost, MemberUnhealthy};
    matches!(change.kind, MemberHealthy | MemberUnhealthy | MemberLost)
}

fn item(change: &StateChange, earlier: &[&StateChange], now: &str) -> Markup {
    let (class, text) = describe(change);
    html! {
        li {
            (time_of(change.at, now)) " "
            @if !change.subject.is_empty() { code { (change.subject) } " " }
            span class={ "state " (class) } { (text) }
            @if let Some(first) = earlier.last() {
                " after " (counted(earlier.len() as u64, "change")) " since " (time_of(first.at, now))
            }
        }
    }
}

/// Class of the colour, and the change in words.
fn describe(change: &StateChange) -> (&'static str, String) {
    let details = &change.details;
    match change.kind {
        ChangeKind::MirrorInService => ("good", format!("in service at {details}")),
        ChangeKind::MirrorOutOfService => {
            let reason = Reason::ALL.iter().find(|reason| reason.as_str() == *details);
            let title = reason.map_or(details.as_str(), |reason| explain_reason(*reason).title);
            ("warning", format!("out of service: {title}"))
        }
        ChangeKind::MemberHealthy => ("good", "healthy".to_owned()),
        ChangeKind::MemberUnhealthy => ("warning", "unhealthy".to_owned()),
        ChangeKind::MemberLost => ("bad", "connection lost".to_owned()),
        ChangeKind::EndpointAdded if *details == EndpointSource::Members.as_str() => {
            ("note", "endpoint of a member, used from now on".to_owned())
        }
        ChangeKind::EndpointAdded => ("note", "endpoint used from now on".to_owned()),
        ChangeKind::EndpointRemoved => ("note", "endpoint used no more".to_owned()),
        ChangeKind::FlagChanged => ("note", format!("changed by a reload: {details}")),
        ChangeKind::FlagsRefused => ("warning", format!("the flags could not be reloaded: {details}")),
        ChangeKind::MemoryOff => ("warning", "memory switched off by an operator".to_owned()),
        ChangeKind::MemoryOn => ("good", "memory switched on again by an operator".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use super::*;

    const NOW: &str = "1970-01-02T12:00:00Z";

    fn change(kind: ChangeKind, subject: &str, details: &str) -> StateChange {
        StateChange {
            at: SystemTime::UNIX_EPOCH + Duration::from_secs(2 * 86_400 - 43_202),
            kind,
            subject: subject.to_owned(),
            details: details.to_owned(),
        }
    }

    #[test]
    fn changes_are_in_words_with_their_times() {
        let all = [
            change(ChangeKind::MirrorOutOfService, "/a/", "feed_lost"),
            change(ChangeKind::FlagChanged, "max-calls", "100 → 7"),
            change(ChangeKind::MemoryOff, "", ""),
        ];
        let html = changes(&all, NOW).unwrap().render_whole();
        for text in [
            "11:59:58 UTC",
            "<code>/a/</code> <span class=\"state warning\">out of service: watch lost</span>",
            "<code>max-calls</code> <span class=\"state note\">changed by a reload: 100 → 7</span>",
            "memory switched off by an operator",
        ] {
            assert!(html.contains(text), "{text} is not in {html}");
        }
        assert!(!html.contains("earlier"), "{html}");
        let many: Vec<_> = (0..8)
            .map(|n| change(ChangeKind::MirrorInService, &format!("/{n}/"), "revision 7"))
            .collect();
        let html = changes(&many, NOW).unwrap().render_whole();
        assert!(html.contains("2 earlier"), "{html}");
        assert!(changes(&[], NOW).is_none());
    }

    #[test]
    fn member_that_comes_and_goes_takes_one_line() {
        let mut all: Vec<_> = [ChangeKind::MemberLost, ChangeKind::MemberHealthy]
            .repeat(8)
            .iter()
            .map(|kind| change(*kind, "http://etcd", ""))
            .collect();
        all.insert(3, change(ChangeKind::MemberHealthy, "http://other", ""));
        all.push(change(ChangeKind::MemoryOff, "", ""));
        let html = changes(&all, NOW).unwrap().render_whole();
        assert_eq!(html.matches("<li>").count(), 3, "{html}");
        assert!(
            html.contains("connection lost</span> after 15 changes since"),
            "{html}"
        );
        assert!(!html.contains("earlier"), "{html}");
    }
}
