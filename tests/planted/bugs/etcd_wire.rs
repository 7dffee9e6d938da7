//! Bugs of `etcd-wire`.

use super::{Bug, Change};

pub(super) const BUGS: &[Bug] = &[
    Bug {
        name: "81-keep-the-buffer-of-a-head",
        what: "the copy of a header list that a watch keeps refers to the buffers of its connection",
        test: "--lib kept_head_has_the_metadata_for_etcd_in_memory_of_its_own",
        shows: "the copy keeps no part of the buffer",
        changes: &[Change {
            item: "copied",
            find: "let mut copied = HeaderValue::from_bytes(value.as_bytes()).unwrap_or_else(|_| value.clone());",
            replace: "let mut copied = value.clone();",
        }],
    },
    Bug {
        name: "100-stop-at-a-new-field",
        what: "a header with a field that is not known shows no revision",
        test: "--test end_to_end newer_etcd::leader_id_in_headers_hides_no_revision",
        shows: "older than the write before it",
        changes: &[Change {
            item: "header",
            find: "
(REVISION, Value::Number(number)) => revision = number.cast_signed(),
_ => {}
",
            replace: "
(REVISION, Value::Number(number)) => revision = number.cast_signed(),
(2 | 4, _) => {}
_ => return Ok(None),
",
        }],
    },
    Bug {
        name: "101-drop-unreadable-headers",
        what: "a header that cannot be read is not reported",
        test: "--test end_to_end newer_etcd::header_that_cannot_be_read_is_counted_and_serializable_reads_are_proven",
        shows: "older than the write before it",
        changes: &[Change {
            item: "HeaderScanner::scan",
            find: "Err(Malformed) => report(Scanned::Malformed),",
            replace: "Err(Malformed) => {}",
        }],
    },
];
