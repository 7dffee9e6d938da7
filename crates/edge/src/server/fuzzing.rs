//! Fuzz target of a connection's bytes: the preface, the frames behind it, and HTTP/1.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "compiled for tests and fuzz targets only"
)]

use std::sync::Arc;

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::{control_frames::SETTINGS_ACKNOWLEDGEMENT, preface::read_preface, serve::fuzzing as http1};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Length of a frame's header.
const HEADER_BYTES: usize = 9;
const SETTINGS: u8 = 4;

/// A client's bytes, in pieces: those of HTTP/2, any, or requests of HTTP/1.
pub fn connection(data: &[u8]) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    match data {
        [0..96, piece, frames @ ..] => runtime.block_on(check_read([PREFACE, frames].concat(), *piece)),
        [96..160, piece, bytes @ ..] => runtime.block_on(check_read(bytes.to_vec(), *piece)),
        [_, requests @ ..] => http1::check(&runtime, requests),
        [] => {}
    }
}

/// The server reads the bytes that were sent, apart from the acknowledgement of settings, which it reads right behind the
/// preface.
async fn check_read(sent: Vec<u8>, piece: u8) {
    match read_all(sent.clone(), usize::from(piece).max(1)).await {
        None => assert!(
            PREFACE.starts_with(&sent) && sent != PREFACE,
            "a beginning is refused"
        ),
        Some(read) if sent.starts_with(PREFACE) => {
            let (first, rest) = read.split_at(PREFACE.len() + SETTINGS_ACKNOWLEDGEMENT.len());
            assert_eq!(first, [PREFACE, &SETTINGS_ACKNOWLEDGEMENT].concat());
            check_frames(&sent[PREFACE.len()..], rest);
        }
        Some(read) => assert_eq!(read, sent),
    }
}

/// Bytes that the server reads; `None` if the connection ends before it is clear which protocol the client uses.
async fn read_all(sent: Vec<u8>, piece: usize) -> Option<Vec<u8>> {
    let (mut client, server) = tokio::io::duplex(piece);
    let sending = tokio::spawn(async move {
        for piece in sent.chunks(piece) {
            client.write_all(piece).await.unwrap();
            tokio::task::yield_now().await;
        }
    });
    let mut server = read_preface(server, Arc::default()).await.ok()?;
    let mut read = Vec::new();
    server.read_to_end(&mut read).await.unwrap();
    sending.await.unwrap();
    Some(read)
}

/// The frames that are read are those that were sent, except that one empty SETTINGS frame, the acknowledgement, has a type
/// that is ignored.
fn check_frames(sent: &[u8], read: &[u8]) {
    assert_eq!(sent.len(), read.len(), "bytes are lost or added");
    let (mut at, mut replaced) = (0, 0);
    while at < sent.len() {
        let header = &sent[at..sent.len().min(at + HEADER_BYTES)];
        let length = match header {
            [high, middle, low, ..] => u32::from_be_bytes([0, *high, *middle, *low]) as usize,
            _ => 0,
        };
        let next = sent.len().min(at + HEADER_BYTES + length);
        if sent[at..next] != read[at..next] {
            assert_eq!(
                (length, header.get(3)),
                (0, Some(&SETTINGS)),
                "another frame is changed"
            );
            let mut original = read[at..next].to_vec();
            original[3] = SETTINGS;
            assert_eq!(original, sent[at..next]);
            replaced += 1;
        }
        at = next;
    }
    assert!(replaced <= 1, "{replaced} frames are changed");
}
