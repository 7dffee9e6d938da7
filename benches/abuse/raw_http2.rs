//! HTTP/2 frames written by hand, for what no client library sends.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use prost::Message;
use testkit::kv::{RANGE, WATCH};
use testkit::pb::{WatchCreateRequest, WatchRequest};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;

use crate::counts::{Counts, RECONNECT_PAUSE};

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const CONTINUATION: u8 = 9;

const END_STREAM: u8 = 0x1;
const ACK: u8 = 0x1;
const END_HEADERS: u8 = 0x4;

/// Largest frame that a peer must accept, in bytes.
const MAX_FRAME_BYTES: usize = 16_384;
/// Value of the header that is put into HPACK's table, in bytes; the table holds 4,096.
const TABLE_VALUE_BYTES: usize = 4_000;
/// Calls that one connection holds open.
const CALLS_PER_CONNECTION: usize = 1_000;
/// Frames written at once by a flood.
const FLOOD_BATCH: usize = 256;

/// Activity of a misbehaving connection.
#[derive(Clone, Copy)]
pub(crate) enum Raw {
    /// Holds calls open whose header list is this many references to a value of [`TABLE_VALUE_BYTES`].
    HeaderBlocks { references: usize },
    /// Holds watches open whose header list is this many references to an empty value.
    WatchHeaders { references: usize },
    /// Sends calls and resets each at once.
    Resets,
    /// Sends pings.
    Pings,
    /// Sends settings.
    Settings,
}

/// Misbehaves on one connection after another, forever.
pub(crate) async fn run(address: String, raw: Raw, counts: Arc<Counts>) {
    loop {
        // An error is the end of a connection: the server's defence, counted below.
        let _ = connection(&address, raw, &counts).await;
        counts.closed.fetch_add(1, Ordering::Relaxed);
        tokio::time::sleep(RECONNECT_PAUSE).await;
    }
}

/// Report of the reading half.
enum Event {
    /// The server has ended or reset this call.
    Ended(u32),
    /// Bytes that the protocol demands in return.
    Reply(Vec<u8>),
}

async fn connection(address: &str, raw: Raw, counts: &Arc<Counts>) -> std::io::Result<()> {
    let tcp = TcpStream::connect(address).await?;
    counts.connections.fetch_add(1, Ordering::Relaxed);
    let (reader, mut writer) = tcp.into_split();
    writer.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await?;
    writer.write_all(&frame(SETTINGS, 0, 0, &[])).await?;
    let (events, mut received) = mpsc::channel(1024);
    let reading = tokio::spawn(read(reader, events, Arc::clone(counts)));
    let outcome = match raw {
        Raw::HeaderBlocks { references } => {
            let fields = Fields {
                references,
                value_bytes: TABLE_VALUE_BYTES,
            };
            hold_calls(&mut writer, &mut received, RANGE, fields, &[], counts).await
        }
        Raw::WatchHeaders { references } => {
            let fields = Fields {
                references,
                value_bytes: 0,
            };
            let create_request = WatchCreateRequest {
                key: b"k".to_vec(),
                ..WatchCreateRequest::default()
            };
            let create = WatchRequest {
                create_request: Some(create_request),
                ..WatchRequest::default()
            };
            let create = testkit::grpc::frame(&create.encode_to_vec());
            hold_calls(&mut writer, &mut received, WATCH, fields, &create, counts).await
        }
        Raw::Resets => flood(&mut writer, &mut received, counts, resets).await,
        Raw::Pings => flood(&mut writer, &mut received, counts, |_| frame(PING, 0, 0, &[7; 8])).await,
        // A value that changes nothing: the initial window.
        Raw::Settings => {
            flood(&mut writer, &mut received, counts, |_| {
                frame(SETTINGS, 0, 0, &[0, 4, 0, 0, 0xff, 0xff])
            })
            .await
        }
    };
    reading.abort();
    outcome
}

/// Fields of a header list that refer to HPACK's table.
#[derive(Clone, Copy)]
struct Fields {
    references: usize,
    /// Length of the value in the table.
    value_bytes: usize,
}

/// Keeps [`CALLS_PER_CONNECTION`] calls open, with `message` unless it is empty; what the server ends is opened again a
/// second later.
async fn hold_calls(
    writer: &mut OwnedWriteHalf,
    received: &mut mpsc::Receiver<Event>,
    path: &str,
    fields: Fields,
    message: &[u8],
    counts: &Counts,
) -> std::io::Result<()> {
    let mut open = HashSet::new();
    let mut next_stream = 1;
    let mut in_table = false;
    let mut tick = tokio::time::interval(Duration::from_secs(1));
    loop {
        tokio::select! {
            _ = tick.tick() => {
                while open.len() < CALLS_PER_CONNECTION {
                    let block = header_block(path, Some(fields), &mut in_table);
                    let mut call = headers(next_stream, &block);
                    if !message.is_empty() {
                        call.extend(frame(DATA, 0, next_stream, message));
                    }
                    writer.write_all(&call).await?;
                    open.insert(next_stream);
                    counts.calls.fetch_add(1, Ordering::Relaxed);
                    next_stream += 2;
                }
            }
            event = received.recv() => match event {
                Some(Event::Ended(stream)) => { open.remove(&stream); }
                Some(Event::Reply(bytes)) => writer.write_all(&bytes).await?,
                None => return Ok(()),
            }
        }
    }
}

/// Writes what `batch` returns, without pause, until the server closes the connection.
async fn flood(
    writer: &mut OwnedWriteHalf,
    received: &mut mpsc::Receiver<Event>,
    counts: &Counts,
    batch: impl Fn(u32) -> Vec<u8>,
) -> std::io::Result<()> {
    let mut number = 0;
    loop {
        let mut bytes = Vec::new();
        for _ in 0..FLOOD_BATCH {
            bytes.extend(batch(number));
            number += 1;
        }
        counts.calls.fetch_add(FLOOD_BATCH as u64, Ordering::Relaxed);
        writer.write_all(&bytes).await?;
        while let Ok(event) = received.try_recv() {
            if let Event::Reply(bytes) = event {
                writer.write_all(&bytes).await?;
            }
        }
        if received.is_closed() {
            return Ok(());
        }
    }
}

/// A call and its reset.
fn resets(number: u32) -> Vec<u8> {
    let stream = 2 * number + 1;
    let mut bytes = headers(stream, &header_block(RANGE, None, &mut false));
    bytes.extend(frame(RST_STREAM, 0, stream, &8_u32.to_be_bytes()));
    bytes
}

/// Reads frames until the connection ends; sends what the other half must know.
async fn read(
    mut reader: OwnedReadHalf,
    events: mpsc::Sender<Event>,
    counts: Arc<Counts>,
) -> std::io::Result<()> {
    loop {
        let mut head = [0; 9];
        reader.read_exact(&mut head).await?;
        let length = usize::from(head[0]) << 16 | usize::from(head[1]) << 8 | usize::from(head[2]);
        let (kind, flags) = (head[3], head[4]);
        let stream = u32::from_be_bytes([head[5] & 0x7f, head[6], head[7], head[8]]);
        let mut payload = vec![0; length];
        reader.read_exact(&mut payload).await?;
        let event = match kind {
            SETTINGS if flags & ACK == 0 => Event::Reply(frame(SETTINGS, ACK, 0, &[])),
            PING if flags & ACK == 0 => Event::Reply(frame(PING, ACK, 0, &payload)),
            RST_STREAM => {
                counts.refused.fetch_add(1, Ordering::Relaxed);
                Event::Ended(stream)
            }
            HEADERS | DATA if flags & END_STREAM != 0 => {
                counts.refused.fetch_add(1, Ordering::Relaxed);
                Event::Ended(stream)
            }
            GOAWAY => {
                counts.goaway.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            _ => continue,
        };
        // A flood reads its events rarely: what finds no room is dropped.
        let _ = events.try_send(event);
    }
}

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(9 + payload.len());
    let length = u32::try_from(payload.len()).unwrap_or(u32::MAX).to_be_bytes();
    bytes.extend_from_slice(&length[1..]);
    bytes.extend_from_slice(&[kind, flags]);
    bytes.extend_from_slice(&stream.to_be_bytes());
    bytes.extend_from_slice(payload);
    bytes
}

/// HEADERS without END_STREAM, continued where one frame is too small.
fn headers(stream: u32, block: &[u8]) -> Vec<u8> {
    let pieces: Vec<&[u8]> = block.chunks(MAX_FRAME_BYTES).collect();
    let mut bytes = Vec::new();
    for (number, piece) in pieces.iter().enumerate() {
        let kind = if number == 0 { HEADERS } else { CONTINUATION };
        let flags = if number + 1 == pieces.len() {
            END_HEADERS
        } else {
            0
        };
        bytes.extend(frame(kind, flags, stream, piece));
    }
    bytes
}

/// HPACK block of a call with `fields`; the first block of a connection puts their value into the table.
fn header_block(path: &str, fields: Option<Fields>, in_table: &mut bool) -> Vec<u8> {
    // Indexed: `:method: POST`, `:scheme: http`.
    let mut block = vec![0x83, 0x86];
    // Literals that are not put into the table: `:path` (name 4), `:authority` (1), `content-type` (31).
    block.push(0x04);
    string(&mut block, path.as_bytes());
    block.push(0x01);
    string(&mut block, b"localhost");
    block.extend([0x0f, 0x10]);
    string(&mut block, b"application/grpc");
    block.push(0x00);
    string(&mut block, b"te");
    string(&mut block, b"trailers");
    if let Some(fields) = fields {
        let mut references = fields.references;
        if !*in_table {
            block.push(0x40);
            string(&mut block, b"x");
            string(&mut block, &vec![b'v'; fields.value_bytes]);
            *in_table = true;
            references -= 1;
        }
        // The table's newest entry has the index 62.
        block.resize(block.len() + references, 0x80 | 62);
    }
    block
}

/// A string without Huffman code; the length is an integer with a prefix of seven bits.
fn string(block: &mut Vec<u8>, text: &[u8]) {
    let mut rest = text.len();
    if rest < 127 {
        block.push(u8::try_from(rest).unwrap_or(0));
    } else {
        block.push(127);
        rest -= 127;
        while rest >= 128 {
            block.push(0x80 | u8::try_from(rest % 128).unwrap_or(0));
            rest /= 128;
        }
        block.push(u8::try_from(rest).unwrap_or(0));
    }
    block.extend_from_slice(text);
}
