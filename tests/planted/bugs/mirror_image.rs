//! Bugs of images.

use super::{Bug, Change};

pub(super) const BUGS: &[Bug] = &[
    Bug {
        name: "154-forget-the-newest-events",
        what: "the newest events of an image are not compared with those of etcd",
        test: "-p rangecache-mirror --lib image_whose_newest_delete_was_of_another_key_is_of_no_use",
        shows: "panicked at",
        changes: &[Change {
            item: "LoadedStore::of",
            find: "
newest_key: anchor.key,
last_event: anchor.last_event,
recent: RecentEvents::restored(&anchor.recent, anchor.recent_is_full),
",
            replace: "",
        }],
    },
    Bug {
        name: "155-skip-the-position-of-an-image",
        what: "an image is used without a comparison of its cluster and raft log",
        test: "-p rangecache-mirror --lib image_of_another_cluster_is_of_no_use",
        shows: "panicked at",
        changes: &[Change {
            item: "is_continued",
            find: "if !position.continues(&before) {",
            replace: "if false && !position.continues(&before) {",
        }],
    },
    Bug {
        name: "156-read-an-image-of-another-version",
        what: "an image of another format is read",
        test: "-p rangecache-mirror --lib image_of_another_version_is_of_no_use",
        shows: "panicked at",
        changes: &[Change {
            item: "Header::decoded",
            find: "if header.format != FORMAT {",
            replace: "if header.format == 0 {",
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
        what: "an unfinished image, and images that no mirror reads, keep their room on the disk",
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
