//! A server that a test plays frame by frame.

#![allow(
    clippy::unwrap_used,
    clippy::missing_panics_doc,
    missing_docs,
    reason = "for tests"
)]

use std::time::Duration;

use bytes::{BufMut as _, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, DuplexStream};

pub const SOON: Duration = Duration::from_secs(20);
pub const DATA: u8 = 0;
pub const HEADERS: u8 = 1;
pub const RST_STREAM: u8 = 3;
pub const SETTINGS: u8 = 4;
pub const PING: u8 = 6;
pub const GOAWAY: u8 = 7;
pub const WINDOW_UPDATE: u8 = 8;
pub const CONTINUATION: u8 = 9;
pub const END_STREAM: u8 = 1;
pub const ACK: u8 = 1;
pub const END_HEADERS: u8 = 4;
pub const PADDED: u8 = 8;
/// `:status: 200` by index.
pub const OK: [u8; 1] = [0x88];

/// The server's side of a connection, as a test plays it.
pub struct Peer<S = DuplexStream>(pub S);

impl<S: AsyncRead + AsyncWrite + Unpin> Peer<S> {
    /// The peer on `stream` that has read the preface.
    pub async fn on(stream: S) -> Peer<S> {
        let mut peer = Peer(stream);
        let mut preface = [0; 24];
        peer.0.read_exact(&mut preface).await.unwrap();
        assert_eq!(&preface, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
        peer
    }

    pub async fn send(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
        let mut frame = BytesMut::new();
        frame.put_uint(payload.len() as u64, 3);
        frame.put_slice(&[kind, flags]);
        frame.put_u32(stream);
        frame.put_slice(payload);
        self.0.write_all(&frame).await.unwrap();
    }

    /// The kind, flags, stream and payload of the next frame.
    pub async fn frame(&mut self) -> (u8, u8, u32, Vec<u8>) {
        let mut prefix = [0; 9];
        let reading = self.0.read_exact(&mut prefix);
        tokio::time::timeout(SOON, reading).await.unwrap().unwrap();
        let [a, b, c, kind, flags, stream @ ..] = prefix;
        let mut payload = vec![0; u32::from_be_bytes([0, a, b, c]) as usize];
        self.0.read_exact(&mut payload).await.unwrap();
        (kind, flags, u32::from_be_bytes(stream), payload)
    }

    /// Reads up to the end of a request, and returns its stream.
    pub async fn request(&mut self) -> u32 {
        loop {
            if let (DATA, END_STREAM, stream, _) = self.frame().await {
                return stream;
            }
        }
    }

    /// Answers the request of `stream` with `body` and without trailers.
    pub async fn answer(&mut self, stream: u32, body: &[u8]) {
        self.send(HEADERS, END_HEADERS, stream, &OK).await;
        self.send(DATA, END_STREAM, stream, body).await;
    }
}
