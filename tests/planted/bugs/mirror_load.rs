//! Bugs of loads.

use super::{Bug, Change};

pub(super) const BUGS: &[Bug] = &[
    Bug {
        name: "65-load-until-never",
        what: "a load that makes no progress begins again for ever",
        test: "-p rangecache-mirror --lib load_that_makes_no_progress_fails",
        shows: "on an .Ok. value",
        changes: &[Change {
            item: "load_all",
            find: "if !error.is_broken() || resumes > MAX_RESUMES {",
            replace: "if !error.is_broken() {",
        }],
    },
    Bug {
        name: "66-prove-by-one-member-of-two",
        what: "a load that was interrupted is proven by the member that it ended at",
        test: "-p rangecache-mirror --lib load_resumes_behind_its_last_key_at_its_revision_after_a_break",
        shows: "no member has kept the whole history of the load",
        changes: &[Change {
            item: "load_all",
            find: "gathered.finish((!is_interrupted).then_some(connection)).await",
            replace: "gathered.finish(Some(connection)).await",
        }],
    },
    Bug {
        name: "106-continue-a-load-without-comparing",
        what: "a load that was interrupted continues without comparing what it has read",
        test: "--test simulation load_interrupted_by_a_rollback_has_keys_of_one_history",
        shows: "assertion .left == right. failed",
        changes: &[Change {
            item: "Gathered::reconnect",
            find: "if let Some(keys) = self.keys().await?",
            replace: "
if let Some(keys) = self.keys().await?
    && false
",
        }],
    },
    Bug {
        name: "144-disable-instead-of-leaving-out",
        what: "a load that does not fit is given up before its values are left out",
        test: "--lib load_over_the_budget_leaves_out_values",
        shows: "load_over_the_budget_leaves_out_values_and_they_are_held_again_once_there_is_room .* FAILED",
        changes: &[Change {
            item: "make_room_of_load",
            find: "if !keys.packs() {",
            replace: "if keys.packs() {",
        }],
    },
    Bug {
        name: "147-adopt-without-a-proof",
        what: "what a mirror had before is kept without a proof of the history",
        test: "-p rangecache-mirror --lib tree_whose_newest_unchanged_entry_has_another_value_is_of_another_history",
        shows: "panicked at",
        changes: &[Change {
            item: "adopt_once",
            find: "if !are_held(&reader, &connection, compared.newest).await? {",
            replace: "if false && !are_held(&reader, &connection, compared.newest).await? {",
        }],
    },
    Bug {
        name: "148-compare-the-newest-kept-entry-only",
        what: "of what is kept only the newest entry is compared",
        test: "-p rangecache-mirror --lib each_of_the_newest_unchanged_entries_is_compared",
        shows: "panicked at",
        changes: &[Change {
            item: "COMPARED_ENTRIES",
            find: "const COMPARED_ENTRIES: usize = 64;",
            replace: "const COMPARED_ENTRIES: usize = 1;",
        }],
    },
    Bug {
        name: "149-keep-keys-behind-the-last",
        what: "keys behind the last one of etcd are kept",
        test: "-p rangecache-mirror --lib whatever_is_not_read_is_the_same",
        shows: "panicked at",
        changes: &[Change {
            item: "Difference::finish",
            find: "self.add_removed(ours);",
            replace: "",
        }],
    },
    Bug {
        name: "150-compare-the-lease-of-a-kept-entry",
        what: "an entry whose lease etcd leaves out counts as changed",
        test: "-p rangecache-mirror --lib same_keys_differ_in_nothing_and_the_newest_are_compared",
        shows: "panicked at",
        changes: &[Change {
            item: "StoredEntry::is_as_old_as",
            find: "let (ours, theirs) = (self.head(), theirs.fields());",
            replace: "
if self.read().is_ok_and(|ours| ours.fields().lease != theirs.fields().lease) {
    return false;
}
let (ours, theirs) = (self.head(), theirs.fields());
",
        }],
    },
    Bug {
        name: "151-forget-the-version-of-a-kept-entry",
        what: "the number of writes of an entry is not compared",
        test: "-p rangecache-mirror --lib entry_with_another_revision_or_version_is_changed",
        shows: "panicked at",
        changes: &[Change {
            item: "StoredEntry::is_as_old_as",
            find: "
(ours.create_revision, ours.mod_revision, ours.version)
    == (theirs.create_revision, theirs.mod_revision, theirs.version)
",
            replace: "(ours.create_revision, ours.mod_revision) == (theirs.create_revision, theirs.mod_revision)",
        }],
    },
    Bug {
        name: "152-trust-neighbours-of-changed-entries",
        what: "unchanged entries that are read with changed ones are not compared",
        test: "-p rangecache-mirror --lib unchanged_entry_that_is_read_with_its_neighbours_is_compared_too",
        shows: "panicked at",
        changes: &[Change {
            item: "apply",
            find: "if tree.contradicts(entries.iter().flatten()) {",
            replace: "if false && tree.contradicts(entries.iter().flatten()) {",
        }],
    },
    Bug {
        name: "175-adopt-more-than-fits",
        what: "what differs is read beyond the memory of the mirror",
        test: "--lib load::adopt::tests::what_differs_is_not_read_beyond_the_memory_of_the_mirror",
        shows: "panicked at .*load/adopt/tests.rs",
        changes: &[Change {
            item: "read_span",
            find: "if held_bytes > load.set.budget_of(load.mirror) {",
            replace: "if held_bytes == load.set.budget_of(load.mirror) {",
        }],
    },
    Bug {
        name: "220-serve-a-neighbours-values",
        what: "values of a neighbour below the newest are served without a comparison",
        test: "--lib value_of_a_neighbour_below_the_newest_is_compared_before_it_is_used",
        shows: "assertion .left == right. failed",
        changes: &[Change {
            item: "Difference::compare",
            find: "if self.with_values && tree.contradicts(&theirs) {",
            replace: "if false && self.with_values && tree.contradicts(&theirs) {",
        }],
    },
    Bug {
        name: "221-wait-for-a-slow-neighbour",
        what: "a neighbour that sends now and then delays a start for ever",
        test: "--lib neighbour_that_sends_more_slowly_than_etcd_is_given_up",
        shows: "Elapsed",
        changes: &[Change {
            item: "longest_wait",
            find: "MESSAGE_TIMEOUT + Duration::from_millis(bytes * 1_000 / LEAST_BYTES_PER_SECOND)",
            replace: "MESSAGE_TIMEOUT + Duration::from_millis(bytes * 1_000)",
        }],
    },
    Bug {
        name: "222-read-long-messages-of-etcd",
        what: "a load reads messages of etcd of any length",
        test: "--lib long_message_of_etcd_is_refused_before_it_is_read_and_pages_have_fewer_keys",
        shows: "[0-9]+ bytes",
        changes: &[Change {
            item: "LoadReader::client",
            find: "KvClient::with_origin(channel, origin).max_decoding_message_size(self.load.set.max_message_bytes())",
            replace: "KvClient::with_origin(channel, origin).max_decoding_message_size(usize::MAX)",
        }],
    },
    Bug {
        name: "223-read-long-messages-of-neighbours",
        what: "a start reads messages of a neighbour of any length",
        test: "--lib long_message_of_a_neighbour_is_refused_before_it_is_read",
        shows: "[0-9]+ bytes",
        changes: &[Change {
            item: "connect",
            find: "Ok(KvClient::with_origin(channel, origin).max_decoding_message_size(set.max_message_bytes()))",
            replace: "Ok(KvClient::with_origin(channel, origin).max_decoding_message_size(usize::MAX))",
        }],
    },
];
