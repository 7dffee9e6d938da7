//! Bound on the control frames of an HTTP/2 connection. Pings, settings, resets and window updates cost their sender
//! next to nothing, and the HTTP/2 library answers pings and settings without any bound.
//!
//! Only the nine bytes of each frame's header are looked at, on the bytes that are read anyway. Clients that measure
//! the round trip (grpc-go does with nearly every response) send more control frames the more they read: each written
//! response byte therefore earns allowance. What an acknowledgement of the client's own frames adds to the written
//! bytes does not. A header list in more than one frame is longer than is permitted, and ends its connection as well.

use std::time::Duration;

use tokio::time::Instant;

use super::pace::FrameBudget;

/// Control frames that a connection may send at once.
const BURST: u64 = 10_000;
/// Control frames per second that a connection may send for any length of time.
const PER_SECOND: u64 = 1_000;
/// Control frames as which the reset of a call counts: what was done for the call was done in vain.
const RESET_FRAMES: u64 = 5;
/// Written bytes that earn one control frame: the shortest response earns several.
const BYTES_PER_FRAME: u64 = 8;

const HEADER_BYTES: usize = 9;
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RESET: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const CONTINUATION: u8 = 9;
const ACKNOWLEDGEMENT: u8 = 1;
const END_HEADERS: u8 = 4;

/// The acknowledgement of settings that the HTTP/2 library reads right after the preface, in place of the client's
/// own one, which is hidden from it: bounds must not wait for the client's consent.
pub(super) const SETTINGS_ACKNOWLEDGEMENT: [u8; HEADER_BYTES] =
    [0, 0, 0, SETTINGS, ACKNOWLEDGEMENT, 0, 0, 0, 0];
/// A type of frame that every HTTP/2 endpoint ignores.
const IGNORED: u8 = 0xee;

/// Part of a connection's bytes that may be handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Handled {
    /// Everything.
    All,
    /// The frames of this turn, of which this is the number of bytes; the others later.
    Turn(usize),
    /// Nothing any more: the client has sent too many control frames.
    Flooded,
}

/// Counts the control frames of one connection.
#[derive(Debug)]
pub(super) struct ControlFrames {
    /// Control frames that may still be sent before time and written bytes are looked at again.
    allowance: u64,
    refilled: Instant,
    /// Bytes written since `refilled`, without acknowledgements.
    written: u64,
    /// Bytes of acknowledgements that are still to be written.
    acknowledgements: u64,
    /// Header of the current frame as far as it was read.
    header: [u8; HEADER_BYTES],
    header_bytes: usize,
    /// Bytes of the current frame that follow its header and were not yet read.
    payload: usize,
    exhausted: bool,
    /// Calls that the client has reset since [`ControlFrames::take_resets`].
    resets: u32,
    /// Remaining budget of the connection's turn.
    turn: FrameBudget,
    /// Whether the client's settings have been read, which precede its acknowledgement.
    seen_settings: bool,
    /// Whether the client's acknowledgement has not been read.
    awaits_acknowledgement: bool,
}

impl ControlFrames {
    /// Counter of a connection whose preface has been read.
    pub(super) fn new() -> ControlFrames {
        ControlFrames {
            allowance: BURST,
            refilled: Instant::now(),
            written: 0,
            acknowledgements: 0,
            header: [0; HEADER_BYTES],
            header_bytes: 0,
            payload: 0,
            exhausted: false,
            resets: 0,
            turn: FrameBudget::new(),
            awaits_acknowledgement: true,
            seen_settings: false,
        }
    }

    /// Begins the connection's next turn.
    pub(super) fn begin_turn(&mut self) {
        self.turn = FrameBudget::new();
    }

    /// Number of calls that the client has reset since the last time.
    pub(super) fn take_resets(&mut self) -> u32 {
        std::mem::take(&mut self.resets)
    }

    /// Counts the frames in the next `bytes` of the client, as far as they may be handled now.
    pub(super) fn read(&mut self, bytes: &mut [u8]) -> Handled {
        let mut at = 0;
        loop {
            let skipped = self.payload.min(bytes.len() - at);
            self.payload -= skipped;
            at += skipped;
            let taken = (HEADER_BYTES - self.header_bytes).min(bytes.len() - at);
            if taken == 0 {
                return Handled::All;
            }
            if self.turn.is_spent() && self.header_bytes == 0 {
                return Handled::Turn(at);
            }
            self.header[self.header_bytes..self.header_bytes + taken].copy_from_slice(&bytes[at..at + taken]);
            let before = self.header_bytes;
            self.header_bytes += taken;
            if before <= 3 && self.header_bytes > 3 && self.is_acknowledgement() {
                bytes[at + 3 - before] = IGNORED;
            }
            at += taken;
            if self.header_bytes == HEADER_BYTES {
                self.header_bytes = 0;
                self.count();
                if self.exhausted {
                    return Handled::Flooded;
                }
            }
        }
    }

    /// Counts bytes written to the client.
    pub(super) fn wrote(&mut self, bytes: usize) {
        let bytes = bytes as u64;
        let acknowledgements = self.acknowledgements.min(bytes);
        self.acknowledgements -= acknowledgements;
        self.written += bytes - acknowledgements;
    }

    /// Whether the current frame is the client's acknowledgement of settings. If the bytes read so far end with its
    /// type, it is taken for one: other settings that are empty mean nothing.
    fn is_acknowledgement(&mut self) -> bool {
        let [high, middle, low, kind, flags, ..] = self.header;
        if [high, middle, low, kind] != [0, 0, 0, SETTINGS] || !self.awaits_acknowledgement {
            return false;
        }
        if self.header_bytes > 4 {
            let is_one = flags & ACKNOWLEDGEMENT != 0;
            self.awaits_acknowledgement = !is_one;
            return is_one;
        }
        self.awaits_acknowledgement = !self.seen_settings;
        self.seen_settings
    }

    /// Counts the frame whose header was read.
    fn count(&mut self) {
        let [high, middle, low, kind, flags, ..] = self.header;
        self.payload = u32::from_be_bytes([0, high, middle, low]) as usize;
        self.turn.spend(kind == HEADERS);
        // A header list within the bound fits one frame. The HTTP/2 library would hold what it has unpacked of a list in
        // parts, several times as much, for as long as its client likes.
        self.exhausted |= kind == HEADERS && flags & END_HEADERS == 0;
        if matches!(kind, DATA | HEADERS | CONTINUATION) {
            return;
        }
        self.seen_settings |= kind == SETTINGS;
        self.resets += u32::from(kind == RESET);
        if matches!(kind, PING | SETTINGS) && flags & ACKNOWLEDGEMENT == 0 {
            // The acknowledgement of a ping repeats its payload, that of settings has none.
            let payload = if kind == PING { 8 } else { 0 };
            self.acknowledgements += HEADER_BYTES as u64 + payload;
        }
        let frames = if kind == RESET { RESET_FRAMES } else { 1 };
        if self.allowance < frames {
            self.refill();
        }
        match self.allowance.checked_sub(frames) {
            Some(allowance) => self.allowance = allowance,
            None => self.exhausted = true,
        }
    }

    fn refill(&mut self) {
        let now = Instant::now();
        let elapsed: Duration = now - self.refilled;
        let by_time = u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX) / (1_000_000 / PER_SECOND);
        let by_bytes = self.written / BYTES_PER_FRAME;
        let earned = by_time.saturating_add(by_bytes);
        self.allowance = self.allowance.saturating_add(earned).min(BURST);
        self.refilled = now;
        self.written = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, flags: u8, payload: usize) -> Vec<u8> {
        let mut frame = u32::try_from(payload).unwrap().to_be_bytes()[1..].to_vec();
        frame.extend([kind, flags, 0, 0, 0, 0]);
        frame.resize(HEADER_BYTES + payload, 0);
        frame
    }

    /// Frames of this kind that are accepted, up to `frames`; after each, `wrote` bytes are written.
    fn accepted(frames: usize, kind: u8, wrote: usize) -> usize {
        let mut meter = ControlFrames::new();
        let flags = if kind == HEADERS { END_HEADERS } else { 0 };
        let mut frame = frame(kind, flags, 8);
        (0..frames)
            .take_while(|_| {
                meter.wrote(wrote);
                meter.begin_turn();
                meter.read(&mut frame) == Handled::All
            })
            .count()
    }

    #[tokio::test(start_paused = true)]
    async fn control_frames_without_responses_are_bounded() {
        for kind in [2, SETTINGS, PING, 8, 200] {
            assert_eq!(accepted(20_000, kind, 0), 10_000, "{kind}");
        }
        assert_eq!(accepted(20_000, RESET, 0), 2_000);
        for kind in [DATA, HEADERS, CONTINUATION] {
            assert_eq!(accepted(20_000, kind, 0), 20_000, "{kind}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn responses_earn_control_frames_and_acknowledgements_do_not() {
        // A ping and its acknowledgement for each response of 60 bytes.
        assert_eq!(accepted(100_000, PING, 17 + 60), 100_000);
        // The first of them is written before any ping.
        assert!(accepted(100_000, PING, 17) < 10_010);
    }

    #[tokio::test(start_paused = true)]
    async fn slow_control_frames_are_never_refused() {
        let mut meter = ControlFrames::new();
        let mut ping = frame(PING, 0, 8);
        for _ in 0..30_000 {
            tokio::time::advance(Duration::from_millis(1)).await;
            meter.begin_turn();
            assert_eq!(meter.read(&mut ping), Handled::All);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn frames_are_counted_however_they_are_cut() {
        for piece in [1, 5, 9, 10, 64, 4_096] {
            let mut meter = ControlFrames::new();
            let mut bytes = [frame(DATA, 0, 100), frame(PING, 0, 8)].concat().repeat(11_000);
            let is_flood = |bytes: &mut [u8]| {
                let mut at = 0;
                loop {
                    match meter.read(&mut bytes[at..]) {
                        Handled::All => return false,
                        Handled::Turn(length) => {
                            at += length;
                            meter.begin_turn();
                        }
                        Handled::Flooded => return true,
                    }
                }
            };
            let flooding = bytes.chunks_mut(piece).position(is_flood);
            // The last byte of the header of the first ping over the bound.
            assert_eq!(flooding, Some((10_000 * (109 + 17) + 109 + 8) / piece), "{piece}");
        }
    }

    #[tokio::test]
    async fn header_list_in_parts_ends_its_connection() {
        let mut meter = ControlFrames::new();
        let mut bytes = [
            frame(HEADERS, END_HEADERS, 9),
            frame(HEADERS, 0, 9),
            frame(CONTINUATION, END_HEADERS, 9),
        ]
        .concat();
        assert_eq!(meter.read(&mut bytes), Handled::Flooded);
    }

    #[tokio::test]
    async fn resets_are_counted() {
        let mut meter = ControlFrames::new();
        let mut bytes = [frame(RESET, 0, 4), frame(HEADERS, 4, 9), frame(RESET, 0, 4)].concat();
        assert_eq!(meter.read(&mut bytes), Handled::All);
        assert_eq!((meter.take_resets(), meter.take_resets()), (2, 0));
    }

    #[tokio::test]
    async fn turn_ends_before_the_next_frame() {
        let request = [frame(HEADERS, 4, 20), frame(DATA, 1, 30)].concat();
        for piece in [1, 8, 9, 10, 29, 68, 1_000, 10_000] {
            let mut meter = ControlFrames::new();
            let mut bytes = request.repeat(100);
            let (mut turns, mut read) = (vec![], 0);
            for bytes in bytes.chunks_mut(piece) {
                let mut at = 0;
                while let Handled::Turn(handled) = meter.read(&mut bytes[at..]) {
                    at += handled;
                    turns.push(read + at);
                    meter.begin_turn();
                }
                read += bytes.len();
            }
            // 128 is the cost of 14 requests, and of one frame with headers more.
            let ends: Vec<usize> = (1..=6)
                .map(|turn| 14 * turn * request.len() + turn.div_ceil(2) * 29)
                .collect();
            assert_eq!(turns[0], ends[0], "{piece}");
            assert!(
                turns.iter().all(|end| [0, 29].contains(&(end % request.len()))),
                "{piece}: {turns:?}"
            );
            assert_eq!(turns.len(), 6, "{piece}");
        }
    }

    #[tokio::test]
    async fn first_acknowledgement_of_settings_is_hidden() {
        let settings = frame(SETTINGS, 0, 0);
        let other = frame(DATA, 0, 20);
        let mut hidden = SETTINGS_ACKNOWLEDGEMENT;
        hidden[3] = IGNORED;
        for piece in 1..70 {
            let mut meter = ControlFrames::new();
            let acknowledgement = SETTINGS_ACKNOWLEDGEMENT.to_vec();
            let sent =
                [&settings, &other, &acknowledgement, &other, &acknowledgement].map(|frame| &frame[..]);
            let mut read = sent.concat();
            for bytes in read.chunks_mut(piece) {
                assert_eq!(meter.read(bytes), Handled::All);
            }
            let expected = [&settings, &other, &hidden[..], &other, &acknowledgement].concat();
            assert_eq!(read, expected, "{piece}");
        }
    }
}
