//! A WebSocket client, for etcd's JSON gateway.

use std::net::IpAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::timeout;

use crate::wait::SOON;

/// Opcode of a text, with the bit of its last part.
const TEXT: u8 = 0x81;

/// An open WebSocket.
#[derive(Debug)]
pub struct WebSocket(TcpStream);

impl WebSocket {
    /// Connects to a URL such as `http://127.0.0.1:2379` from this local address and opens a WebSocket at `path`.
    ///
    /// # Errors
    /// The response, if it is not an upgrade; empty if there is none.
    pub async fn open(local: IpAddr, url: &str, path: &str) -> Result<Self, String> {
        let authority = url.strip_prefix("http://").ok_or("only http:// is supported")?;
        let socket = TcpSocket::new_v4().map_err(|error| error.to_string())?;
        socket
            .bind((local, 0).into())
            .map_err(|error| error.to_string())?;
        let to = authority.parse().map_err(|_| "not an address".to_owned())?;
        let stream = socket.connect(to).await.map_err(|error| error.to_string())?;
        Self::upgrade(stream, authority, path).await
    }

    /// Opens a WebSocket on a connection.
    ///
    /// # Errors
    /// As for [`WebSocket::open`].
    pub async fn upgrade(mut stream: TcpStream, host: &str, path: &str) -> Result<Self, String> {
        let request = format!(
            "GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: Upgrade\r\nupgrade: websocket\r\n\
             sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        );
        let head = async {
            let mut head = Vec::new();
            if stream.write_all(request.as_bytes()).await.is_err() {
                return head;
            }
            while !head.ends_with(b"\r\n\r\n") {
                match stream.read_u8().await {
                    Ok(byte) => head.push(byte),
                    Err(_) => break,
                }
            }
            head
        };
        let head = timeout(SOON, head).await.map_err(|_| "no response in time")?;
        let head = String::from_utf8_lossy(&head).into_owned();
        if head.starts_with("HTTP/1.1 101") {
            Ok(Self(stream))
        } else {
            Err(head)
        }
    }

    /// Sends a text of at most 125 bytes.
    ///
    /// # Errors
    /// If the connection is closed.
    pub async fn send(&mut self, text: &str) -> std::io::Result<()> {
        let length = u8::try_from(text.len()).unwrap_or(u8::MAX);
        assert!(length <= 125, "longer texts have another head");
        // Clients mask what they send; this mask changes nothing.
        let mut frame = vec![TEXT, 0x80 | length, 0, 0, 0, 0];
        frame.extend(text.as_bytes());
        self.0.write_all(&frame).await
    }

    /// The next text; `None` at the end of the connection, or without one in time.
    pub async fn next(&mut self) -> Option<String> {
        timeout(SOON, self.read()).await.ok()?
    }

    async fn read(&mut self) -> Option<String> {
        let mut head = [0; 2];
        self.0.read_exact(&mut head).await.ok()?;
        let length = match head[1] {
            126 => usize::from(self.0.read_u16().await.ok()?),
            length => usize::from(length),
        };
        let mut text = vec![0; length];
        self.0.read_exact(&mut text).await.ok()?;
        (head[0] == TEXT).then(|| String::from_utf8_lossy(&text).into_owned())
    }
}
