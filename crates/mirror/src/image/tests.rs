//! Images on a real disk: what is read is what was written, or nothing; and only what is of etcd's history is used.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use tempfile::TempDir;

use super::base::BaseWriter;
use super::error::Useless;
use super::header::Header;
use super::log::LogWriter;
use super::restore::{Restored, read_files};
use super::*;
use crate::lifecycle::start;
use crate::lineage::Fingerprint;
use crate::mirrors::Mirrors;
use crate::testing::{Bench, Etcd, SOON, live};
use crate::view::Mirror;
use etcd_store::cache::testing::KeyValue;
use etcd_store::cache::{Change, HistoryLimits, Packing, Store, Tree};
use etcd_store::keyspace::scope::Scope;
use etcd_wire::etcdserverpb::RangeRequest;

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

type Contents = (i64, Vec<(Vec<u8>, i64, Vec<u8>)>);

/// Writes an image: a base, and a log of these events, each list with one append. Returns what it had after each.
fn write(images: &Images, scope: &Scope, base: &[KeyValue], appended: &[Vec<Change>]) -> Vec<Contents> {
    let tree = Tree::from_sorted(base.iter().map(KeyValue::entry));
    let revision = base.iter().map(|kv| kv.mod_revision).max().unwrap_or(1);
    let files = images.files(scope);
    let header = Header::of_base(scope, &fingerprint(revision), images.key.is_some());
    let mut writer = BaseWriter::begin(files.create_base().unwrap(), &header, images.key.as_ref()).unwrap();
    while !writer.write_piece(&tree).unwrap() {}
    let length = writer.finish().unwrap();
    files.replace_base(&images.folder).unwrap();
    assert_eq!(length, fs::metadata(&files.base).unwrap().len());
    let section = header.of_next_section();
    let mut log = LogWriter::begin(files.open_log().unwrap(), 0, &section, images.key.as_ref()).unwrap();
    let mut store = Store::new(tree, revision, HistoryLimits::default(), Duration::ZERO);
    let mut states = vec![(revision, contents(store.tree()))];
    for changes in appended {
        let before = store.revision();
        // A revision above: what the store has reached without events.
        let reached = changes.last().map_or(before, Change::revision) + 1;
        store.apply(changes.clone(), reached, Duration::ZERO).unwrap();
        let batches: Vec<_> = store.log().batches_after(before).cloned().collect();
        log.append(before, fingerprint(reached), &batches).unwrap();
        states.push((reached, contents(store.tree())));
    }
    states
}

fn read_back(images: &Images, scope: &Scope) -> Result<Restored, Useless> {
    let bounds = (Packing::Never, u64::MAX);
    read_files(
        images,
        scope,
        bounds,
        (HistoryLimits::default(), Duration::ZERO),
        |_| {},
    )
}

fn state(restored: &Restored) -> Contents {
    assert_eq!(restored.reached, fingerprint(restored.reached.revision));
    (restored.reached.revision, contents(restored.loaded.tree()))
}

fn put(key: &str, revision: i64, value: &str) -> Change {
    Change::put(KeyValue::new(key, revision, value).entry())
}

/// A base of 40 keys, and three appends.
fn example(images: &Images, scope: &Scope) -> Vec<Contents> {
    let base: Vec<_> = (0..40)
        .map(|n| {
            KeyValue::new(
                format!("/k{n:02}"),
                n + 2,
                "value".repeat(usize::try_from(n).unwrap()),
            )
        })
        .collect();
    let appended = [
        vec![put("/k01", 50, "a"), put("/new", 50, "b")],
        vec![],
        vec![
            Change::delete(KeyValue::deleted("/k02", 60).entry()),
            put("/k03", 61, "c"),
        ],
    ];
    write(images, scope, &base, &appended)
}

#[test]
fn image_has_what_was_written() {
    for key in [None, Some(KEY)] {
        let (dir, scope) = (Dir::new(), Scope::prefix(b"/"));
        let images = dir.images(key);
        let states = example(&images, &scope);
        let restored = read_back(&images, &scope).unwrap();
        assert_eq!(Some(&state(&restored)), states.last());
        let files = images.files(&scope);
        let plain = fs::read(files.base).unwrap();
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
    let base: Vec<_> = key_values.collect();
    let large: Vec<_> = (0..5)
        .map(|n| put("large", 100 + n, &"y".repeat(700 << 10)))
        .collect();
    let states = write(&images, &scope, &base, &[large]);
    let restored = read_back(&images, &scope).unwrap();
    assert_eq!(Some(&state(&restored)), states.last());
    // Nothing at all is an image, too.
    let states = write(&images, &scope, &[], &[]);
    assert_eq!(Some(&state(&read_back(&images, &scope).unwrap())), states.last());
}

#[test]
fn image_that_is_cut_off_anywhere_is_older_or_of_no_use() {
    for key in [None, Some(KEY)] {
        let (dir, scope) = (Dir::new(), Scope::prefix(b"/"));
        let images = dir.images(key);
        let states = example(&images, &scope);
        let files = images.files(&scope);
        let [base, log] = [&files.base, &files.log].map(|path| fs::read(path).unwrap());
        let mut found = vec![false; states.len()];
        for length in 0..log.len() {
            fs::write(&files.log, &log[..length]).unwrap();
            let restored = state(&read_back(&images, &scope).unwrap());
            let which = states.iter().position(|state| *state == restored);
            found[which.unwrap_or_else(|| panic!("{length} bytes of the log"))] = true;
        }
        assert_eq!(
            found,
            [true, true, true, false],
            "all of it is needed for the last state"
        );
        for length in 0..base.len() {
            fs::write(&files.base, &base[..length]).unwrap();
            assert!(read_back(&images, &scope).is_err(), "{length} bytes of the base");
        }
    }
}

#[test]
fn image_with_a_flipped_bit_is_older_or_of_no_use() {
    for key in [None, Some(KEY)] {
        let (dir, scope) = (Dir::new(), Scope::prefix(b"/"));
        let images = dir.images(key);
        let states = example(&images, &scope);
        let files = images.files(&scope);
        for path in [&files.base, &files.log] {
            let whole = fs::read(path).unwrap();
            for at in 0..whole.len() {
                let mut flipped = whole.clone();
                flipped[at] ^= 1 << (at % 8);
                fs::write(path, &flipped).unwrap();
                if let Ok(restored) = read_back(&images, &scope) {
                    let restored = state(&restored);
                    assert!(
                        path == &files.log && states[..states.len() - 1].contains(&restored),
                        "byte {at} of {}",
                        path.display()
                    );
                }
            }
            fs::write(path, &whole).unwrap();
        }
    }
}

#[test]
fn log_of_another_base_is_not_used() {
    let (dir, scope) = (Dir::new(), Scope::prefix(b"/"));
    let images = dir.images(None);
    example(&images, &scope);
    let files = images.files(&scope);
    let log = fs::read(&files.log).unwrap();
    let states = example(&images, &scope);
    fs::write(&files.log, &log).unwrap();
    assert_eq!(state(&read_back(&images, &scope).unwrap()), states[0]);
}

#[test]
fn frames_that_are_repeated_or_missing_end_the_log() {
    let (dir, scope) = (Dir::new(), Scope::prefix(b"/"));
    let images = dir.images(None);
    let states = example(&images, &scope);
    let files = images.files(&scope);
    let restored = read_back(&images, &scope).unwrap();
    let header = restored.header_of_tests();
    // A section of its own, whose events the image has already; then one that leaves some out.
    for (after, is_next) in [(60, false), (63, false), (62, true)] {
        let length = fs::metadata(&files.log).unwrap().len();
        let section = header.of_next_section();
        let mut log = LogWriter::begin(files.open_log().unwrap(), length, &section, None).unwrap();
        log.append(after, fingerprint(70), &[]).unwrap();
        let read = read_back(&images, &scope).unwrap();
        let expected = if is_next { 70 } else { states.last().unwrap().0 };
        assert_eq!(read.reached.revision, expected, "after {after}");
        fs::File::options()
            .write(true)
            .open(&files.log)
            .unwrap()
            .set_len(length)
            .unwrap();
    }
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
        assert!(matches!(error, Useless::Frame(_)), "{error}");
    }
}

#[test]
fn image_of_another_scope_or_too_large_is_of_no_use() {
    let (dir, scope) = (Dir::new(), Scope::prefix(b"/"));
    let images = dir.images(None);
    example(&images, &scope);
    let other = Scope::prefix(b"/other/");
    fs::copy(images.files(&scope).base, images.files(&other).base).unwrap();
    assert!(matches!(read_back(&images, &other), Err(Useless::Header(_))));
    let limits = (HistoryLimits::default(), Duration::ZERO);
    let read = read_files(&images, &scope, (Packing::Never, 1000), limits, |_| {});
    assert!(matches!(read, Err(Useless::TooLarge)));
}

proptest! {
    #[test]
    fn any_keys_and_events_are_read_back(
        sizes in prop::collection::vec(0..3000_usize, 0..60),
        writes in prop::collection::vec(
            prop::collection::vec((0..80_usize, 0..1000_usize, any::<bool>()), 0..8), 0..6),
        is_encrypted in any::<bool>(),
    ) {
        let (dir, scope) = (Dir::new(), Scope::prefix(b""));
        let images = dir.images(is_encrypted.then_some(KEY));
        let mut revision = 1;
        let base: Vec<_> = sizes.iter().enumerate().map(|(n, size)| {
            revision += 1;
            KeyValue::new(format!("k{n:02}"), revision, "v".repeat(*size))
        }).collect();
        let appended: Vec<Vec<_>> = writes.iter().map(|writes| {
            let changes = writes.iter().map(|(n, size, is_delete)| {
                revision += 1;
                let key = format!("k{n:02}");
                if *is_delete {
                    Change::delete(KeyValue::deleted(key, revision).entry())
                } else {
                    put(&key, revision, &"w".repeat(*size))
                }
            }).collect();
            // What was reached without events.
            revision += 1;
            changes
        }).collect();
        let states = write(&images, &scope, &base, &appended);
        let restored = read_back(&images, &scope).unwrap();
        prop_assert_eq!(Some(&state(&restored)), states.last());
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
            read.is_ok_and(|restored| restored.reached.revision == revision)
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
    // The same base, and the log continued.
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
    let expected = bench.load().await.unwrap().tree;
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

#[tokio::test]
async fn damaged_image_is_discarded() {
    let dir = Dir::new();
    let bench = stopped(&dir).await;
    let base = dir.images(None).files(&Scope::prefix(b"")).base;
    let mut bytes = fs::read(&base).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&base, bytes).unwrap();
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
    process
        .until(|_| !files.base.exists() && !files.log.exists())
        .await;
}

#[tokio::test]
async fn image_of_a_mirror_that_was_removed_is_removed() {
    let (dir, bench) = (Dir::new(), Bench::new().await);
    let process = Process::start(&bench, &dir);
    process.image_reaches(&dir, 4).await;
    process.mirrors.set.get(0).unwrap().remove();
    let files = dir.images(None).files(&Scope::prefix(b""));
    process.until(|_| !files.base.exists()).await;
}

#[tokio::test]
async fn image_that_cannot_be_written_stops_nothing_and_is_written_later() {
    let (dir, bench) = (Dir::new(), Bench::new().await);
    // Room for the image, not for a base that was not finished.
    let process = Process::start_with(&bench, &dir, &["--image-max-bytes=100KiB"]);
    process.image_reaches(&dir, 4).await;
    let away = dir.0.path().join("away");
    let files = dir.images(None).files(&Scope::prefix(b""));
    fs::rename(dir.path(), &away).unwrap();
    fs::write(away.join(files.new_base.file_name().unwrap()), [0; 200 << 10]).unwrap();
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

/// A process that was killed leaves a base that it had not finished; one with other prefixes leaves images that no mirror reads.
#[tokio::test]
async fn leftovers_of_other_processes_take_no_room() {
    let (dir, bench) = (Dir::new(), Bench::new().await);
    let images = dir.images(None);
    let (own, other) = (
        images.files(&Scope::prefix(b"")),
        images.files(&Scope::prefix(b"/other/")),
    );
    let leftovers = [own.new_base, other.new_base, other.base, other.log];
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
    let log = dir.images(None).files(&Scope::prefix(b"")).log;
    let make = || {
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, &log, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    };
    // Opened without waiting for a writer, which no longer waits then.
    let responds = || {
        let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::NONBLOCK;
        rustix::fs::open(&log, flags, rustix::fs::Mode::empty()).unwrap()
    };
    let process = Process::start(&bench, &dir);
    // Before its first step.
    make();
    process
        .until(|process| process.mirror().metrics.image_failed.get() == 1)
        .await;
    let revision = bench.etcd.lock().put("d", "event").revision();
    process.reaches(revision).await;
    let reader = responds();
    fs::remove_file(&log).unwrap();
    process.image_reaches(&dir, revision).await;
    process
        .until(|process| process.mirror().metrics.image_failed.get() == 0)
        .await;
    process.stop().await;
    drop(reader);

    // It is not waited for at the end.
    fs::remove_file(dir.images(None).files(&Scope::prefix(b"")).base).unwrap();
    fs::remove_file(&log).unwrap();
    let process = Process::start(&bench, &dir);
    make();
    process
        .until(|process| process.mirror().metrics.image_failed.get() == 1)
        .await;
    process.stop_but(1).await;
    drop(responds());
}

#[tokio::test]
async fn second_process_on_a_folder_reads_and_does_not_write() {
    let (dir, bench) = (Dir::new(), Bench::new().await);
    let first = Process::start(&bench, &dir);
    first.image_reaches(&dir, 4).await;
    let second = Process::start(&bench, &dir);
    second.reaches(4).await;
    assert_eq!(second.adopted("image"), 1);
    let log = dir.images(None).files(&Scope::prefix(b"")).log;
    let before = fs::read(&log).unwrap();
    bench.etcd.lock().put("d", "event");
    first.reaches(5).await;
    second.reaches(5).await;
    first.image_reaches(&dir, 5).await;
    assert!(fs::read(&log).unwrap().starts_with(&before));
    // It writes once the first has ended.
    first.stop().await;
    bench.etcd.lock().put("d", "another event");
    second.reaches(6).await;
    second.image_reaches(&dir, 6).await;
}

#[tokio::test]
async fn image_that_another_process_has_replaced_is_not_continued() {
    let (dir, bench) = (Dir::new(), Bench::new().await);
    let first = Process::start(&bench, &dir);
    first.image_reaches(&dir, 4).await;
    let second = Process::start(&bench, &dir);
    second.reaches(4).await;
    let base = dir.images(None).files(&Scope::prefix(b"")).base;
    let before = fs::read(&base).unwrap();
    let epoch = first.mirror().epoch();
    let wrong = rangecache_base::telemetry::Reason::Mismatch;
    first.mirror().end_epoch(epoch, wrong).unwrap();
    first
        .until(|_| fs::read(&base).is_ok_and(|base| base != before))
        .await;
    first.image_reaches(&dir, 4).await;
    first.stop().await;
    bench.etcd.lock().put("d", "event");
    second.reaches(5).await;
    second.image_reaches(&dir, 5).await;
}
