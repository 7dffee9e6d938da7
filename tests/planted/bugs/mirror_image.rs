//! Bugs of images.

use super::{Bug, Change};

pub(super) const BUGS: &[Bug] = &[
    Bug {
        name: "154-continue-a-log-with-a-gap",
        what: "events of a log that does not continue the image are applied",
        test: "-p rangecache-mirror --lib frames_that_are_repeated_or_missing_end_the_log",
        shows: "panicked at",
        changes: &[Change {
            item: "read_files",
            find: "events.after == reached.revision && events.reached.cluster_id == reached.cluster_id;",
            replace: "events.reached.cluster_id == reached.cluster_id;",
        }],
    },
    Bug {
        name: "155-skip-the-position-of-an-image",
        what: "an image is used without a comparison of its cluster and raft log",
        test: "-p rangecache-mirror --lib image_of_another_cluster_is_of_no_use",
        shows: "panicked at",
        changes: &[Change {
            item: "Restored::compare",
            find: "
if !Position::read(&connection, key.clone(), &before)
    .await?
    .continues(&before)
{
",
            replace: "if Position::read(&connection, key.clone(), &before).await.is_err() {",
        }],
    },
    Bug {
        name: "156-use-the-log-of-another-base",
        what: "the log of another base is applied",
        test: "-p rangecache-mirror --lib log_of_another_base_is_not_used",
        shows: "panicked at",
        changes: &[Change {
            item: "read_log",
            find: "|header: &Header| header.image == base.image && header.check_encryption(key).is_ok();",
            replace: "|header: &Header| header.check_encryption(key).is_ok();",
        }],
    },
    Bug {
        name: "157-keep-the-image-of-a-wrong-mirror",
        what: "the image of a mirror that was found wrong stays",
        test: "-p rangecache-mirror --lib image_whose_keys_were_found_wrong_is_removed",
        shows: "panicked at",
        changes: &[Change {
            item: "Keeper::try_step",
            find: "self.remove().await;",
            replace: "",
        }],
    },
    Bug {
        name: "190-keep-what-other-processes-left",
        what: "an unfinished base, and images that no mirror reads, keep their room on the disk",
        test: "-p rangecache-mirror --lib leftovers_of_other_processes_take_no_room",
        shows: "panicked at",
        changes: &[Change {
            item: "Folder::remove_leftovers",
            find: "if name.is_some_and(|name| name.starts_with(IMAGE)) && !self.own.contains(&path) {",
            replace: "if name.is_some_and(|name| name.starts_with(IMAGE)) && path == self.path {",
        }],
    },
    Bug {
        name: "191-follow-links-of-images",
        what: "a link in the folder of images is followed",
        test: "-p rangecache-mirror --lib links_and_files_of_other_users_are_refused_and_stay_as_they_are",
        shows: "panicked at",
        changes: &[Change {
            item: "open",
            find: ".custom_flags(OFlags::NOFOLLOW.bits().cast_signed())",
            replace: ".custom_flags(OFlags::CLOEXEC.bits().cast_signed())",
        }],
    },
];
