use proptest::prelude::*;

use super::*;
use crate::cache::{StoredEntry, gather::gather, ledger::Ledger, testing::KeyValue};

/// Entries of the gathered leaf: 100 to 500 bytes each, in one block, and one that is too large for it in their middle.
const GATHERED: usize = 20;

#[derive(Clone, Debug)]
enum Part {
    Written(Vec<u8>),
    Entry(usize),
    Tagged(usize),
    /// Entries of a leaf that is gathered, from one index to before another; in reverse if the second is lower.
    Gathered(usize, usize),
}

fn part() -> impl Strategy<Value = Part> {
    prop_oneof![
        prop::collection::vec(any::<u8>(), 0..60).prop_map(Part::Written),
        prop_oneof![0..200_usize, 950..1100_usize, 9000..30_000_usize].prop_map(Part::Entry),
        prop_oneof![0..200_usize, 950..1100_usize, 9000..30_000_usize].prop_map(Part::Tagged),
        (0..=GATHERED, 0..=GATHERED).prop_map(|(from, to)| Part::Gathered(from, to)),
    ]
}

#[derive(Clone, Debug)]
enum Read {
    Advance(prop::sample::Index),
    Small(usize),
    Chunk,
    Vectored(usize),
    Copy(usize),
}

fn read() -> impl Strategy<Value = Read> {
    prop_oneof![
        any::<prop::sample::Index>().prop_map(Read::Advance),
        (0..3000_usize).prop_map(Read::Small),
        Just(Read::Chunk),
        (0..20_usize).prop_map(Read::Vectored),
        (0..5000_usize).prop_map(Read::Copy),
    ]
}

fn key_value(length: usize) -> KeyValue {
    let value: Vec<u8> = (0..length).map(|at| (at % 251) as u8).collect();
    KeyValue::new("key", 1, value)
}

fn in_leaf() -> (Vec<KeyValue>, Vec<Entry>) {
    let length = |index| {
        if index == GATHERED / 2 {
            5000
        } else {
            100 + 20 * index
        }
    };
    let plain: Vec<_> = (0..GATHERED).map(|index| key_value(length(index))).collect();
    let entries = gathered(plain.iter().map(KeyValue::entry));
    (plain, entries)
}

/// The entries, in blocks if they can be.
fn gathered(entries: impl IntoIterator<Item = Entry>) -> Vec<Entry> {
    let mut stored: Vec<_> = entries.into_iter().map(StoredEntry::from).collect();
    let mut ledger = Ledger::of(&stored);
    gather(&mut stored, &mut ledger);
    stored.iter().map(|stored| stored.read().unwrap()).collect()
}

fn build(parts: &[Part]) -> (Rope, Vec<u8>) {
    let (plain, entries) = in_leaf();
    let mut rope = Rope::with_slab(0);
    let mut expected = Vec::new();
    for part in parts {
        match part {
            Part::Written(bytes) => {
                rope.write(|slab| slab.extend_from_slice(bytes));
                expected.extend_from_slice(bytes);
            }
            Part::Entry(length) => {
                let kv = key_value(*length);
                rope.push(&kv.entry());
                expected.extend(kv.field());
            }
            Part::Gathered(from, to) => {
                let range: Vec<usize> = if from <= to {
                    (*from..*to).collect()
                } else {
                    (*to..*from).rev().collect()
                };
                for index in range {
                    rope.push(&entries[index]);
                    expected.extend(plain[index].field());
                }
            }
            Part::Tagged(length) => {
                let kv = key_value(*length);
                rope.push_with_tag(0x1a, &kv.entry());
                expected.push(0x1a);
                expected.extend(&kv.field()[1..]);
            }
        }
    }
    (rope, expected)
}

/// Checks that the vectored chunks of `buf`, at most `most`, are a prefix of `expected`.
fn check_vectored(buf: &impl Buf, expected: &[u8], most: usize) -> usize {
    let mut slices = vec![IoSlice::new(&[]); most];
    let filled = buf.chunks_vectored(&mut slices);
    assert!(
        slices[..filled].iter().all(|slice| !slice.is_empty()),
        "an empty slice"
    );
    let seen: Vec<u8> = slices[..filled]
        .iter()
        .flat_map(|slice| slice.iter().copied())
        .collect();
    assert!(expected.starts_with(&seen));
    assert!(
        filled == most || seen.len() == expected.len(),
        "{filled} of {most} slices, but bytes left over"
    );
    filled
}

proptest! {
    #[test]
    fn rope_reads_as_the_concatenation_of_its_parts(
        parts in prop::collection::vec(part(), 0..30),
        reads in prop::collection::vec(read(), 0..60),
    ) {
        let (mut rope, expected) = build(&parts);
        let mut rest = expected.as_slice();
        for read in reads {
            prop_assert_eq!(rope.remaining(), rest.len());
            let count = match read {
                Read::Advance(index) => index.index(rest.len() + 1),
                Read::Small(count) => count.min(rest.len()),
                Read::Chunk => {
                    let chunk = rope.chunk();
                    prop_assert!(rest.starts_with(chunk));
                    prop_assert_eq!(chunk.is_empty(), rest.is_empty());
                    chunk.len()
                }
                Read::Vectored(most) => {
                    check_vectored(&rope, rest, most);
                    0
                }
                Read::Copy(count) => {
                    let count = count.min(rest.len());
                    let copied = rope.copy_to_bytes(count);
                    prop_assert_eq!(&copied[..], &rest[..count]);
                    rest = &rest[count..];
                    continue;
                }
            };
            rope.advance(count);
            rest = &rest[count..];
        }
        prop_assert_eq!(rope.copy_to_bytes(rope.remaining()), rest);
        prop_assert!(!rope.has_remaining() && rope.chunk().is_empty());
    }

    #[test]
    fn rope_from_bytes_reads_as_these_bytes(bytes in prop::collection::vec(any::<u8>(), 0..100), cut in any::<prop::sample::Index>()) {
        let mut rope = Rope::from(Bytes::from(bytes.clone()));
        let cut = cut.index(bytes.len() + 1);
        rope.advance(cut);
        check_vectored(&rope, &bytes[cut..], 3);
        prop_assert_eq!(rope.copy_to_bytes(rope.remaining()), &bytes[cut..]);
    }
}

#[test]
fn large_entries_are_referenced_and_small_ones_copied() {
    let (small, large) = (
        KeyValue::new("key", 1, vec![0; 100]).entry(),
        KeyValue::new("key", 1, vec![0; 20_000]).entry(),
    );
    let mut rope = Rope::with_slab(1000);
    for entry in [&small, &small, &large] {
        rope.push(entry);
    }
    assert!(small.is_unshared() && !large.is_unshared());
    assert_eq!(rope.segments.len(), 2);
    assert_eq!(rope.slab.len(), 2 * small.encoded_len());
    drop(rope);
    assert!(large.is_unshared());
}

#[test]
#[should_panic(expected = "beyond the end")]
fn advancing_beyond_the_end_panics() {
    Rope::from(Bytes::from_static(b"abc")).advance(4);
}

#[test]
fn ropes_can_be_sent_between_threads() {
    fn is_send<T: Buf + Send + 'static>() {}
    is_send::<Rope>();
}

#[test]
fn neighbours_in_a_block_are_one_segment_and_a_short_one_is_copied() {
    let (plain, entries) = in_leaf();
    let mut rope = Rope::default();
    entries[..GATHERED / 2].iter().for_each(|entry| rope.push(entry));
    rope.write(|slab| slab.push(1));
    assert_eq!(
        rope.pieces().map(<[u8]>::len).collect::<Vec<_>>(),
        [plain[..GATHERED / 2].iter().map(|kv| kv.field().len()).sum(), 1]
    );
    let mut rope = Rope::default();
    for index in [3, 5, 7] {
        rope.push(&entries[index]);
    }
    rope.write(|slab| slab.push(1));
    assert_eq!(
        rope.pieces().count(),
        1,
        "entries that are no neighbours share the slab"
    );
}

#[test]
fn entry_is_joined_to_none_of_another_block() {
    let value = |fill: u8| KeyValue::new("key", 1, vec![fill; 200]);
    let two = |fill: u8| gathered([value(fill).entry(), value(fill).entry()]);
    let (of_a, of_b) = (two(b'a'), two(b'b'));
    let mut rope = Rope::default();
    rope.push(&of_a[0]);
    // It begins where that one ends.
    rope.push(&of_b[1]);
    let expected = [value(b'a').field(), value(b'b').field()].concat();
    assert_eq!(rope.pieces().collect::<Vec<_>>().concat(), expected);
}
