//! Bugs of configuration, admin port, findings and serving.

use super::{Bug, Change};

pub(super) const BUGS: &[Bug] = &[
    Bug {
        name: "90-count-what-was-dropped",
        what: "a request of the admin port uses up its turn before it waits for it",
        test: "--lib requests_that_are_dropped_while_they_wait_cost_the_next_one_nothing",
        shows: "panicked at crates/admin/src/renderings.rs",
        changes: &[Change {
            item: "RequestPace::turn",
            find: "
sleep_until(due.checked_sub(self.burst).unwrap_or(due)).await;
// Only now: until here the request may have been dropped.
*self.next.lock() = due + self.interval;
",
            replace: "
*self.next.lock() = due + self.interval;
sleep_until(due.checked_sub(self.burst).unwrap_or(due)).await;
",
        }],
    },
    Bug {
        name: "93-keep-unread-pages",
        what: "pages of the admin port that are not read are counted and not bounded",
        test: "--test end_to_end unread_pages_of_the_admin_port_are_bounded_and_counted",
        shows: "connections make room for pages|panicked at tests/limits/admin.rs",
        changes: &[Change {
            item: "Renderings::render",
            find: "while self.unread.bytes.get() >= MAX_UNREAD_BYTES {",
            replace: "while self.unread.bytes.get() >= MAX_UNREAD_BYTES << 20 {",
        }],
    },
    Bug {
        name: "145-stop-the-static-pod-before",
        what: "the static pod before is stopped, although the new one shares its ports",
        test: "--lib only_a_pod_that_does_not_share_its_ports_is_stopped_before_the_new_one_is_ready",
        shows: r"left: \[\[",
        changes: &[Change {
            item: "install",
            find: "if !others.iter().all(|other| new.shares_ports_with(Manifest(other))) {",
            replace: "if !others.is_empty() {",
        }],
    },
    Bug {
        name: "146-take-the-old-static-pod-for-the-new",
        what: "whatever static pod responds is taken for the new one",
        test: "--lib pod_before_is_not_taken_for_the_new_one",
        shows: "panicked at",
        changes: &[Change {
            item: "install",
            find: "Ok(seen) if seen.name.starts_with(pod) => match seen.unready {",
            replace: "Ok(seen) => match seen.unready {",
        }],
    },
    Bug {
        name: "192-send-a-token-in-plain-text",
        what: "the token of --user goes to a neighbour without TLS",
        test: "--lib flags::tests::token_is_not_sent_in_plain_text_beside_tls",
        shows: "panicked at",
        changes: &[Change {
            item: "Config::validate",
            find: "if self.etcd.user.is_some() && endpoints.iter().any(|url| url.tls) {",
            replace: "if self.etcd.user.is_some() && endpoints.iter().all(|url| !url.tls) {",
        }],
    },
    Bug {
        name: "195-give-up-for-a-file",
        what: "a file that cannot be read ends the process as misuse does, and systemd gives up",
        test: "--test end_to_end files_that_cannot_be_used_exit_1_with_a_remedy",
        shows: "left: Some.64",
        changes: &[Change {
            item: "explain",
            find: "ErrorKind::Io => ExitCode::FAILURE,",
            replace: "ErrorKind::Io => ExitCode::from(MISUSE),",
        }],
    },
    Bug {
        name: "197-accept-a-cache-above-the-limit",
        what: "a cache above the memory limit is no finding",
        test: "--lib cache_that_may_take_more_than_the_memory_limit_is_bad",
        shows: "panicked at",
        changes: &[Change {
            item: "budget_above_memory",
            find: "(budget_bytes > limit_bytes).then(|| finding.with_meaning(meaning))",
            replace: "(budget_bytes > limit_bytes.saturating_mul(2)).then(|| finding.with_meaning(meaning))",
        }],
    },
    Bug {
        name: "198-warn-of-a-certificate-until-it-has-expired",
        what: "a certificate that expires today is a warning",
        test: "--lib certificate_is_a_finding_two_weeks_before_it_expires",
        shows: "panicked at",
        changes: &[Change {
            item: "certificate_finding",
            find: "0 => finding.with_severity(Severity::Bad),",
            replace: "..0 => finding.with_severity(Severity::Bad),",
        }],
    },
    Bug {
        name: "204-feed-on-the-threads-of-calls",
        what: "feeds and the admin port run on the threads of calls",
        test: "--test end_to_end feed_and_admin_port_run_while_the_threads_of_calls_are_busy",
        shows: "feed_and_admin_port_run_while_the_threads_of_calls_are_busy .* FAILED",
        changes: &[Change {
            item: "run",
            find: "let ended = runtime.block_on(serve(",
            replace: "let ended = calls.block_on(serve(",
        }],
    },
    Bug {
        name: "250-forget-the-first-refused-reload",
        what: "a reload of the flags that is refused is no finding while its alert fires",
        test: "--lib counter_that_grows_is_found_until_its_time_is_over",
        shows: "panicked at crates/admin/src/symptoms.rs",
        changes: &[Change {
            item: "Course::shows",
            find: "Condition::Grows(more_than) => grown > more_than,",
            replace: "Condition::Grows(more_than) => grown > more_than + 1.0,",
        }],
    },
    Bug {
        name: "251-take-an-empty-memory-for-ready",
        what: "health --ready passes while memory answers nothing",
        test: "--test end_to_end running_rangecache_is_asked_and_does_what_it_is_told",
        shows: "panicked at tests/operate/running.rs",
        changes: &[Change {
            item: "answers_from_memory",
            find: "!handles.mirrors.forwards_all() && handles.mirrors.all().any(has_keys)",
            replace: "handles.mirrors.all().any(has_keys)",
        }],
    },
];
