//! Images on a real disk: what is read is what was written, or nothing; and only what is of etcd's history is used.

use std::{fs, path::PathBuf, sync::Arc, time::Duration};

use etcd_store::cache::{Change, Tree, TreeBuilder};
use etcd_store::{cache::testing::KeyValue, keyspace::scope::Scope};
use etcd_wire::etcdserverpb::RangeRequest;
use proptest::prelude::*;
use tempfile::TempDir;

use super::file::{Header, ImageWriter};
use super::{frame::Useless, restore::read_file, *};
use crate::lineage::{Anchor, Fingerprint};
use crate::testing::{Bench, Etcd, SOON, live};
use crate::{lifecycle::start, load::Have, mirrors::Mirrors, view::Mirror};

const KEY: &str = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";
const OTHER_KEY: &str = "10112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";

/// A folder for images.
struct Dir(TempDir);

impl Dir {
    fn new() -> Dir {
        Dir(testkit::disk::folder_with_room())
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("images")
    }

    /// Flags of images, encrypted with a key or not.
    fn flags(&self, key: Option<&str>) -> Vec<String> {
        let mut flags = vec![format!("--image-dir={}", self.path().display())];
        if let Some(key) = key {
            let file = self.0.path().join("key");
            fs::write(&file, key).unwrap();
            flags.push(format!("--image-key-file={}", file.display()));
        }
        flags
    }

    fn images(&self, key: Option<&str>) -> Images {
        let flags = self.flags(key);
        let flags: Vec<_> = flags.iter().map(String::as_str).collect();
        Images::open(&live(&flags).load()).unwrap().unwrap()
    }
}

fn fingerprint(revision: i64) -> Fingerprint {
    Fingerprint {
        cluster_id: 7,
        revision,
        compacted: revision / 2,
        raft_gap: revision + 3,
    }
}

/// Contents that a test compares: the revision, and every key with its last write and its value.
fn contents(tree: &Tree) -> Vec<(Vec<u8>, i64, Vec<u8>)> {
    let mut contents = Vec::new();
    tree.for_each_from(0, |entry| {
        let entry = entry.read().unwrap();
        let fields = entry.fields();
        let value = fields.value.contiguous().into_owned();
        contents.push((fields.key.to_vec(), entry.mod_revision(), value));
        std::ops::ControlFlow::Continue(())
    });
    contents
}

/// Writes an image of these keys and newest events; returns what it has.
fn write(images: &Images, scope: &Scope, keys: &[KeyValue], recent: &[Change]) -> Anchor {
    let revision = keys.iter().map(|kv| kv.mod_revision);
    let revision = revision.chain(recent.iter().map(Change::revision)).max();
    let last = recent.last();
    let anchor = Anchor {
        revision: revision.unwrap_or(1),
        key: last.map(|last| last.key().to_vec().into()),
        last_event: last.map(Change::revision),
        recent: recent.to_vec(),
        recent_is_full: recent.len() > 1,
        tree: Tree::from_sorted(keys.iter().map(KeyValue::entry)),
        base: None,
    };
    let files = images.files(scope);
    let header = Header::new(scope, &fingerprint(anchor.revision), images.key.is_some());
    let mut writer = ImageWriter::begin(files.create().unwrap(), &header, images.key.as_ref()).unwrap();
    while !writer.write_piece(&anchor.tree).unwrap() {}
    let length = writer.finish(&anchor).unwrap();
    files.replace(&images.folder).unwrap();
    assert_eq!(length, fs::metadata(&files.image).unwrap().len());
    anchor
}

fn read_back(images: &Images, scope: &Scope) -> Result<Have, Useless> {
    let (have, _) = read_file(images, scope, (TreeBuilder::default(), u64::MAX), |_| {})?;
    Ok(have)
}

/// Fails unless `images` has what was `written`.
fn is_read_back(images: &Images, scope: &Scope, written: &Anchor) {
    let have = read_back(images, scope).unwrap();
    assert_eq!(have.lineage, Some(fingerprint(written.revision)));
    let parts = |anchor: &Anchor| {
        let events = anchor
            .recent
            .iter()
            .map(|change| (change.kind, change.entry.key_value()));
        let events: Vec<_> = events.collect();
        let newest = (anchor.key.clone(), anchor.last_event, anchor.recent_is_full);
        (anchor.revision, contents(&anchor.tree), events, newest)
    };
    assert_eq!(parts(&have.anchor), parts(written));
}

fn put(key: &str, revision: i64, value: &str) -> Change {
    Change::put(KeyValue::new(key, revision, value).entry())
}

/// An image of 40 keys and three events.
fn example(images: &Images, scope: &Scope) -> Anchor {
    let key = |n: usize| KeyValue::new(format!("/k{n:02}"), n as i64 + 2, "value".repeat(n));
    let keys: Vec<_> = (0..40).map(key).collect();
    let recent = [
        put("/k01", 50, "a"),
        Change::delete(KeyValue::deleted("/k99", 60).entry()),
        put("/k03", 61, "c"),
    ];
    write(images, scope, &keys, &recent)
}

#[test]
fn image_has_what_was_written() {
    for key in [None, Some(KEY)] {
        let (dir, scope) = (Dir::new(), Scope::prefix(b"/"));
        let images = dir.images(key);
        let written = example(&images, &scope);
        is_read_back(&images, &scope, &written);
        let plain = fs::read(images.files(&scope).image).unwrap();
        let shows_values = |text: &[u8]| plain.windows(text.len()).any(|window| window == text);
        assert_eq!(shows_values(b"value"), key.is_none());
    }
}

#[test]
fn entries_of_any_size_are_written_in_pieces() {
    let (dir, scope) = (Dir::new(), Scope::prefix(b""));
    let images = dir.images(None);
    let sizes = [0, 1, 3 << 20, 10, 700 << 10, 700 << 10, 5];
    let key_values = (0..)
        .zip(sizes)
        .map(|(n, size)| KeyValue::new(format!("k{n}"), n + 2, "x".repeat(size)));
    let keys: Vec<_> = key_values.collect();
    let written = write(&images, &scope, &keys, &[]);
    is_read_back(&images, &scope, &written);
    // Nothing at all is an image, too.
    let written = write(&images, &scope, &[], &[]);
    is_read_back(&images, &scope, &written);
}

#[test]
fn image_that_is_cut_off_anywhere_or_has_a_flipped_bit_is_of_no_use() {
    for key in [None, Some(KEY)] {
        let (dir, scope) = (Dir::new(), Scope::prefix(b"/"));
        let images = dir.images(key);
        example(&images, &scope);
        let path = images.files(&scope).image;
        let whole = fs::read(&path).unwrap();
        for at in 0..whole.len() {
            fs::write(&path, &whole[..at]).unwrap();
            assert!(read_back(&images, &scope).is_err(), "{at} bytes");
            let mut flipped = whole.clone();
            flipped[at] ^= 1 << (at % 8);
            fs::write(&path, &flipped).unwrap();
            assert!(read_back(&images, &scope).is_err(), "byte {at}");
        }
    }
}

#[test]
fn image_of_another_version_is_of_no_use() {
    let (dir, scope) = (Dir::new(), Scope::prefix(b"/"));
    let images = dir.images(None);
    // The field with the number of the format, alone.
    let old = super::frame::sealed(&[0x08, 1], std::iter::empty());
    fs::write(images.files(&scope).image, old).unwrap();
    let error = read_back(&images, &scope).err().unwrap();
    assert_eq!(error.to_string(), "it was written by another version");
}

#[test]
fn image_of_another_key_or_without_one_is_of_no_use() {
    let scope = Scope::prefix(b"/");
    for (written, read) in [
        (Some(KEY), Some(OTHER_KEY)),
        (Some(KEY), None),
        // Who can write the folder could put anything there.
        (None, Some(KEY)),
    ] {
        let dir = Dir::new();
        example(&dir.images(written), &scope);
        let error = read_back(&dir.images(read), &scope).err().unwrap();
        assert!(
            matches!(error, Useless::Seal | Useless::NoKey | Useless::NotEncrypted),
            "{error}"
        );
    }
}

#[test]
fn image_of_another_scope_or_too_large_is_of_no_use() {
    let (dir, scope) = (Dir::new(), Scope::prefix(b"/"));
    let images = dir.images(None);
    example(&images, &scope);
    let other = Scope::prefix(b"/other/");
    fs::copy(images.files(&scope).image, images.files(&other).image).unwrap();
    assert!(matches!(read_back(&images, &other), Err(Useless::Scope)));
    let read = read_file(&images, &scope, (TreeBuilder::default(), 1000), |_| {});
    assert!(matches!(read, Err(Useless::TooLarge)));
}

proptest! {
    #[test]
    fn any_keys_and_events_are_read_back(
        sizes in prop::collection::vec(0..3000_usize, 0..60),
        events in prop::collection::vec((0..80_usize, 0..1000_usize, any::<bool>()), 0..64),
        is_encrypted in any::<bool>(),
    ) {
        let (dir, scope) = (Dir::new(), Scope::prefix(b""));
        let images = dir.images(is_encrypted.then_some(KEY));
        let keys: Vec<_> = (2..).zip(&sizes).map(|(revision, size)| {
            KeyValue::new(format!("k{revision:02}"), revision, "v".repeat(*size))
        }).collect();
        let recent: Vec<_> = (100..).zip(&events).map(|(revision, (n, size, is_delete))| {
            let key = format!("k{n:02}");
            if *is_delete {
                Change::delete(KeyValue::deleted(key, revision).entry())
            } else {
                put(&key, revision, &"w".repeat(*size))
            }
        }).collect();
        let written = write(&images, &scope, &keys, &recent);
        is_read_back(&images, &scope, &written);
    }
}

/// A process with images, in front of the bench's etcd.
struct Process {
    mirrors: Arc<Mirrors>,
}

impl Process {
    fn start(bench: &Bench, dir: &Dir) -> Process {
        Process::start_with(bench, dir, &[])
    }

    fn start_with(bench: &Bench, dir: &Dir, more: &[&str]) -> Process {
        let flags = dir.flags(None);
        let flags: Vec<_> = flags
            .iter()
            .map(String::as_str)
            .chain(more.iter().copied())
            .collect();
        let mirrors = bench.mirrors(&flags);
        start(&mirrors, 0);
        Process { mirrors }
    }

    fn mirror(&self) -> &Mirror {
        self.mirrors.at(0).unwrap()
    }

    async fn reaches(&self, revision: i64) {
        self.mirror().want(self.mirrors.cluster_state.history(), revision);
        self.until(|process| process.mirror().revision() == Ok(revision))
            .await;
    }

    /// Waits until the image has `revision`.
    async fn image_reaches(&self, dir: &Dir, revision: i64) {
        let images = dir.images(None);
        self.until(|_| {
            let read = read_back(&images, &Scope::prefix(b""));
            read.is_ok_and(|have| have.anchor.revision == revision)
        })
        .await;
    }

    async fn until(&self, condition: impl Fn(&Process) -> bool) {
        let waiting = async {
            while !condition(self) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(SOON, waiting).await.unwrap();
    }

    fn adopted(&self, source: &'static str) -> u64 {
        self.mirror().metrics.adopted.of(source).get()
    }

    async fn stop(self) {
        self.stop_but(0).await;
    }

    /// Stops it, but for this many threads that wait for the disk.
    async fn stop_but(self, threads: usize) {
        self.mirrors.stop.cancel();
        let images = self.mirrors.images.clone().unwrap();
        let weak = Arc::downgrade(&images);
        drop((self, images));
        let released = async {
            while weak.strong_count() > threads {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(SOON, released).await.unwrap();
    }
}

/// Reads of values since the first `skipped`, comparisons of the newest keys excepted.
fn values_read(etcd: &Etcd, skipped: usize) -> Vec<RangeRequest> {
    let reads = etcd.reads[skipped..].iter();
    reads.filter(|read| read.min_mod_revision == 0).cloned().collect()
}

/// A stopped process that has left an image of `a`, `b` and `c`, and of `d`, which it got as an event.
async fn stopped(dir: &Dir) -> Bench {
    let bench = Bench::new().await;
    let first = Process::start(&bench, dir);
    first.image_reaches(dir, 4).await;
    bench.etcd.lock().put("d", "event");
    first.reaches(5).await;
    first.image_reaches(dir, 5).await;
    first.stop().await;
    bench
}

#[tokio::test]
async fn start_from_an_image_reads_only_what_has_changed_since() {
    let dir = Dir::new();
    let bench = stopped(&dir).await;
    let read_before = bench.etcd.lock().reads.len();
    bench.etcd.lock().put("e", "while it was stopped");
    let second = Process::start(&bench, &dir);
    second.reaches(6).await;
    assert_eq!(second.adopted("image"), 1);
    let values = values_read(&bench.etcd.lock(), read_before);
    assert_eq!(values, [], "nothing but comparisons");
    let keys = contents(&second.mirror().view().unwrap().tree);
    assert_eq!(keys.len(), 5);
    // Another image, written meanwhile.
    second.image_reaches(&dir, 6).await;
    second.stop().await;
    let third = Process::start(&bench, &dir);
    third.reaches(6).await;
    assert_eq!(third.adopted("image"), 2, "of both processes together");
    assert_eq!(contents(&third.mirror().view().unwrap().tree), keys);
}

#[tokio::test]
async fn image_behind_a_compaction_is_brought_up_to_date_by_what_differs() {
    let dir = Dir::new();
    let bench = stopped(&dir).await;
    {
        let mut etcd = bench.etcd.lock();
        etcd.put("e", "new");
        etcd.compacted = 6;
    }
    let second = Process::start(&bench, &dir);
    second.reaches(6).await;
    assert_eq!(second.adopted("image"), 1);
    assert_eq!(second.mirror().view().unwrap().tree.len(), 5);
    assert!(second.mirror().metrics.adopted_bytes.of("image").get() > 0);
}

/// Fails unless a start after `change` reads everything and has etcd's keys.
async fn is_of_no_use(change: impl FnOnce(&mut Etcd)) -> Process {
    let dir = Dir::new();
    let bench = stopped(&dir).await;
    change(&mut bench.etcd.lock());
    let revision = bench.etcd.lock().revision;
    let second = Process::start(&bench, &dir);
    second.reaches(revision).await;
    let tree = second.mirror().view().unwrap().tree;
    let expected = bench.load().await.unwrap().anchor.tree;
    assert_eq!(contents(&tree), contents(&expected));
    second
}

#[tokio::test]
async fn image_of_another_cluster_is_of_no_use() {
    let second = is_of_no_use(|etcd| etcd.cluster_id = 8).await;
    assert_eq!(second.adopted("image"), 0);
}

#[tokio::test]
async fn image_of_an_etcd_that_was_rolled_back_is_of_no_use() {
    let second = is_of_no_use(|etcd| {
        etcd.revision = 4;
        etcd.events.pop();
    })
    .await;
    assert_eq!(second.adopted("image"), 0);
}

#[tokio::test]
async fn image_of_a_history_that_was_written_again_is_of_no_use() {
    // The same keys, revisions and raft log: only a value differs, of the newest event or of an older key.
    for rewritten in [5, 3] {
        is_of_no_use(|etcd| {
            etcd.rewrite(rewritten);
            etcd.put("e", "later");
        })
        .await;
        is_of_no_use(|etcd| {
            etcd.rewrite(rewritten);
            etcd.put("e", "later");
            etcd.compacted = 6;
        })
        .await;
    }
}

/// Of the newest events one is a delete of another key: neither the newest keys nor their number show it.
#[tokio::test]
async fn image_whose_newest_delete_was_of_another_key_is_of_no_use() {
    let dir = Dir::new();
    let bench = Bench::new().await;
    let first = Process::start(&bench, &dir);
    first.image_reaches(&dir, 4).await;
    for n in 0..70 {
        bench.etcd.lock().put(&format!("k{n:02}"), "event");
    }
    bench.etcd.lock().delete("c");
    first.reaches(75).await;
    first.stop().await;
    {
        let mut etcd = bench.etcd.lock();
        etcd.events.pop();
        etcd.revision -= 1;
        etcd.delete("b");
        etcd.put("e", "later");
    }
    let second = Process::start(&bench, &dir);
    second.reaches(76).await;
    let expected = bench.load().await.unwrap().anchor.tree;
    assert_eq!(
        contents(&second.mirror().view().unwrap().tree),
        contents(&expected)
    );
}

#[tokio::test]
async fn damaged_image_is_discarded() {
    let dir = Dir::new();
    let bench = stopped(&dir).await;
    let path = dir.images(None).files(&Scope::prefix(b"")).image;
    let mut bytes = fs::read(&path).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&path, bytes).unwrap();
    let second = Process::start(&bench, &dir);
    second.reaches(5).await;
    assert_eq!(second.adopted("image"), 0);
    second.image_reaches(&dir, 5).await;
}

#[tokio::test]
async fn image_whose_keys_were_found_wrong_is_removed() {
    let (dir, bench) = (Dir::new(), Bench::new().await);
    let process = Process::start(&bench, &dir);
    process.image_reaches(&dir, 4).await;
    let files = dir.images(None).files(&Scope::prefix(b""));
    // Its mirror cannot be loaded again, so that no other image is written.
    bench.etcd.lock().cluster_id = 0;
    let epoch = process.mirror().epoch();
    process
        .mirror()
        .end_epoch(epoch, rangecache_base::telemetry::Reason::Mismatch)
        .unwrap();
    process.until(|_| !files.image.exists()).await;
}

#[tokio::test]
async fn image_of_a_mirror_that_was_removed_is_removed() {
    let (dir, bench) = (Dir::new(), Bench::new().await);
    let process = Process::start(&bench, &dir);
    process.image_reaches(&dir, 4).await;
    process.mirrors.set.get(0).unwrap().remove();
    let files = dir.images(None).files(&Scope::prefix(b""));
    process.until(|_| !files.image.exists()).await;
}

#[tokio::test]
async fn image_that_cannot_be_written_stops_nothing_and_is_written_later() {
    let (dir, bench) = (Dir::new(), Bench::new().await);
    // Room for the image, not for one that was not finished.
    let process = Process::start_with(&bench, &dir, &["--image-max-bytes=100KiB"]);
    process.image_reaches(&dir, 4).await;
    let away = dir.0.path().join("away");
    let files = dir.images(None).files(&Scope::prefix(b""));
    fs::rename(dir.path(), &away).unwrap();
    fs::write(away.join(files.new_image.file_name().unwrap()), [0; 200 << 10]).unwrap();
    for value in ["one", "another"] {
        let revision = bench.etcd.lock().put("d", value).revision();
        process.reaches(revision).await;
    }
    process
        .until(|process| process.mirror().metrics.image_failed.get() == 1)
        .await;
    fs::rename(&away, dir.path()).unwrap();
    process.image_reaches(&dir, 6).await;
    process
        .until(|process| process.mirror().metrics.image_failed.get() == 0)
        .await;
}

/// A process that was killed leaves an image that it had not finished; one with other prefixes leaves images that no mirror reads.
#[tokio::test]
async fn leftovers_of_other_processes_take_no_room() {
    let (dir, bench) = (Dir::new(), Bench::new().await);
    let images = dir.images(None);
    let (own, other) = (
        images.files(&Scope::prefix(b"")),
        images.files(&Scope::prefix(b"/other/")),
    );
    // Of another version, whose images had a log.
    let log = own.image.with_extension("log");
    let leftovers = [own.new_image, other.new_image, other.image, log];
    for file in &leftovers {
        fs::write(file, [0; 40 << 10]).unwrap();
    }
    let foreign = dir.path().join("notes.log");
    fs::write(&foreign, "of the operator").unwrap();
    let process = Process::start_with(&bench, &dir, &["--image-max-bytes=50KiB"]);
    process.image_reaches(&dir, 4).await;
    assert!(leftovers.iter().all(|file| !file.exists()));
    assert!(foreign.exists());
}

/// A disk that does not respond, like a FIFO without a reader.
#[tokio::test]
async fn disk_that_does_not_respond_is_reported_and_stops_nothing() {
    let (dir, bench) = (Dir::new(), Bench::new().await);
    let new_image = dir.images(None).files(&Scope::prefix(b"")).new_image;
    let make = || {
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, &new_image, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    };
    // Opened without waiting for a writer, which no longer waits then.
    let responds = || {
        let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::NONBLOCK;
        rustix::fs::open(&new_image, flags, rustix::fs::Mode::empty()).unwrap()
    };
    let process = Process::start(&bench, &dir);
    process.image_reaches(&dir, 4).await;
    make();
    let revision = bench.etcd.lock().put("d", "event").revision();
    process.reaches(revision).await;
    process
        .until(|process| process.mirror().metrics.image_failed.get() == 1)
        .await;
    let reader = responds();
    fs::remove_file(&new_image).unwrap();
    process.image_reaches(&dir, revision).await;
    process
        .until(|process| process.mirror().metrics.image_failed.get() == 0)
        .await;
    drop(reader);

    // It is not waited for at the end.
    make();
    let revision = bench.etcd.lock().put("d", "another event").revision();
    process.reaches(revision).await;
    process
        .until(|process| process.mirror().metrics.image_failed.get() == 1)
        .await;
    process.stop_but(1).await;
    drop(responds());
}

#[tokio::test]
async fn image_is_written_at_the_end_of_the_process() {
    let (dir, bench) = (Dir::new(), Bench::new().await);
    let process = Process::start(&bench, &dir);
    process.image_reaches(&dir, 4).await;
    let revision = bench.etcd.lock().put("d", "event").revision();
    process.reaches(revision).await;
    process.stop().await;
    let have = read_back(&dir.images(None), &Scope::prefix(b"")).unwrap();
    assert_eq!(have.anchor.revision, revision);
    let recent: Vec<_> = have.anchor.recent.iter().map(Change::revision).collect();
    assert_eq!(recent, [revision]);
}

#[tokio::test]
async fn second_process_on_a_folder_reads_and_does_not_write() {
    let (dir, bench) = (Dir::new(), Bench::new().await);
    let first = Process::start(&bench, &dir);
    first.image_reaches(&dir, 4).await;
    let second = Process::start(&bench, &dir);
    second.reaches(4).await;
    assert_eq!(second.adopted("image"), 1);
    bench.etcd.lock().put("d", "event");
    first.reaches(5).await;
    second.reaches(5).await;
    first.image_reaches(&dir, 5).await;
    assert!(!second.mirrors.images.as_ref().unwrap().folder.lock().unwrap());
    // It writes once the first has ended.
    first.stop().await;
    bench.etcd.lock().put("d", "another event");
    second.reaches(6).await;
    second.image_reaches(&dir, 6).await;
}
