//! Connections that a client and etcd have upgraded: WebSockets.
//!
//! What etcd sends is the body of the response, so that it is counted, bounded and logged like every other response.
//! [`Upgrade::start`] writes that body to the client's connection, and what the client sends to etcd's. The call lasts as long
//! as the body, and the client's connection keeps its place among all connections.

use std::task::{Context, Poll, ready};
use std::{fmt, pin::Pin, sync::Arc, time::Duration};

use bytes::{Buf, Bytes};
use http_body::{Body, Frame};
use http_body_util::BodyExt;
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use rangecache_mirror::{Unreadable, lineage::ClusterState};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf, ReadHalf, WriteHalf};
use tokio::time::{Instant, sleep_until, timeout};

use super::send::Forward;
use crate::response::{BodySource, Polled, ResponseBody};

/// Longest piece that is read at once, in bytes.
const PIECE_BYTES: usize = 16 << 10;
/// Bytes of both directions that are buffered.
pub(super) const UPGRADED_BYTES: u64 = 2 * PIECE_BYTES as u64;
/// Time after which a connection is closed on which neither side has sent a byte. WebSocket's pings and progress
/// notifications of a watch count.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60 * 60);
/// Time after which a connection is closed whose client reads nothing of what is there for it.
const UNREAD_TIMEOUT: Duration = Duration::from_secs(60);

/// etcd's side of an upgraded connection.
type EtcdConnection = TokioIo<Upgraded>;

/// The parts of an upgrade that are not in the body of the response: an extension of the response, taken once.
#[derive(Clone)]
pub(crate) struct Upgrade(Arc<Mutex<Option<Ends>>>);

struct Ends {
    client: OnUpgrade,
    to_etcd: WriteHalf<EtcdConnection>,
}

impl fmt::Debug for Upgrade {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Upgrade")
    }
}

impl Upgrade {
    /// The upgrade of the connections of a client and of `etcd`, and the source of what etcd sends. `held` is kept as long as the
    /// source.
    pub(super) fn new<H>(
        client: OnUpgrade,
        etcd: Upgraded,
        cluster_state: &Arc<ClusterState>,
        held: H,
    ) -> (Upgrade, FromEtcd<ReadHalf<EtcdConnection>, H>) {
        let (from_etcd, to_etcd) = tokio::io::split(TokioIo::new(etcd));
        let source = FromEtcd {
            stream: from_etcd,
            cluster_state: Arc::clone(cluster_state),
            _held: held,
        };
        let ends = Some(Ends { client, to_etcd });
        (Upgrade(Arc::new(Mutex::new(ends))), source)
    }

    /// Copies until one side closes its connection, or neither sends anything for too long. `body` is the response's; `on_received`
    /// runs after each read from the client.
    pub(crate) fn start(
        self,
        forward: &Forward,
        body: ResponseBody,
        on_received: impl Fn() + Send + Sync + 'static,
    ) {
        let Some(Ends { client, to_etcd }) = self.0.lock().take() else {
            return;
        };
        let copying = async move {
            if let Ok(client) = client.await {
                let client = tokio::io::split(TokioIo::new(client));
                copy(client, to_etcd, body, on_received).await;
            }
        };
        // Without the signal an open WebSocket would delay the stop of the process.
        let stop = forward.drain.clone();
        forward
            .tasks
            .spawn(async move { stop.run_until_cancelled(copying).await });
    }
}

/// Source of what etcd sends on an upgraded connection. It may show revisions in a form that is not parsed (I11).
#[derive(Debug)]
pub(super) struct FromEtcd<R, H> {
    stream: R,
    cluster_state: Arc<ClusterState>,
    _held: H,
}

impl<R, H> BodySource for FromEtcd<R, H>
where
    R: AsyncRead + Unpin + fmt::Debug + Send,
    H: fmt::Debug + Send,
{
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Polled {
        // Not kept: most WebSockets are open and have nothing to send.
        let mut piece = [0; PIECE_BYTES];
        let mut piece = ReadBuf::new(&mut piece);
        ready!(Pin::new(&mut self.stream).poll_read(cx, &mut piece))?;
        if piece.filled().is_empty() {
            return Poll::Ready(None);
        }
        // Noted before the client gets it.
        self.cluster_state.note_unreadable(Unreadable::Json);
        let data = Bytes::copy_from_slice(piece.filled());
        Poll::Ready(Some(Ok(Frame::data(data.into()))))
    }

    fn may_be_idle(&self) -> bool {
        true
    }
}

/// Copies `body` to the client, and to etcd what the client sends. An error is an end: either side may close a WebSocket at any
/// time.
async fn copy<R, W, B>(
    (mut from_client, mut to_client): (R, W),
    mut to_etcd: impl AsyncWrite + Unpin,
    mut body: B,
    on_received: impl Fn(),
) where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
    B: Body + Unpin,
{
    let last_byte = Mutex::new(Instant::now());
    let downstream = async {
        while let Some(Ok(frame)) = body.frame().await {
            let Ok(mut data) = frame.into_data() else {
                continue;
            };
            while data.has_remaining() {
                match timeout(UNREAD_TIMEOUT, to_client.write_buf(&mut data)).await {
                    Ok(Ok(1..)) => *last_byte.lock() = Instant::now(),
                    _ => return,
                }
            }
            if !matches!(timeout(UNREAD_TIMEOUT, to_client.flush()).await, Ok(Ok(()))) {
                return;
            }
        }
        let _ = timeout(UNREAD_TIMEOUT, to_client.shutdown()).await;
    };
    let upstream = async {
        let mut piece = vec![0; PIECE_BYTES];
        loop {
            let Ok(read) = from_client.read(&mut piece).await else {
                return;
            };
            if read == 0 {
                break;
            }
            *last_byte.lock() = Instant::now();
            on_received();
            if to_etcd.write_all(&piece[..read]).await.is_err() || to_etcd.flush().await.is_err() {
                return;
            }
        }
        // The client may still read what etcd sends before it closes its side, too.
        if to_etcd.shutdown().await.is_ok() {
            std::future::pending().await
        }
    };
    let idle = async {
        loop {
            let end = *last_byte.lock() + IDLE_TIMEOUT;
            if end <= Instant::now() {
                return;
            }
            sleep_until(end).await;
        }
    };
    tokio::select! {
        () = downstream => {}
        () = upstream => {}
        () = idle => tracing::debug!("nothing was sent on a WebSocket for an hour; it is closed"),
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::StreamBody;
    use tokio::io::{DuplexStream, duplex};

    use super::*;

    const PING: Duration = Duration::from_secs(50 * 60);

    /// The two ends of a WebSocket between a client and an etcd that send and read when they are told to.
    struct Scene {
        client: DuplexStream,
        etcd: DuplexStream,
        copying: tokio::task::JoinHandle<Duration>,
    }

    impl Scene {
        fn start() -> Scene {
            let (client, of_client) = duplex(64);
            let (etcd, of_etcd) = duplex(64);
            let (from_etcd, to_etcd) = tokio::io::split(of_etcd);
            let pieces = futures_util::stream::unfold(from_etcd, async |mut from_etcd| {
                let mut piece = [0; 64];
                let read = from_etcd.read(&mut piece).await.ok().filter(|read| *read > 0)?;
                let frame = Frame::data(Bytes::copy_from_slice(&piece[..read]));
                Some((Ok::<_, std::io::Error>(frame), from_etcd))
            });
            let body = StreamBody::new(Box::pin(pieces));
            let copying = tokio::spawn(async move {
                let start = Instant::now();
                copy(tokio::io::split(of_client), to_etcd, body, || {}).await;
                start.elapsed()
            });
            Scene {
                client,
                etcd,
                copying,
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn websocket_without_a_byte_for_an_hour_is_closed() {
        let scene = Scene::start();
        assert_eq!(scene.copying.await.unwrap(), IDLE_TIMEOUT);
        let mut scene = Scene::start();
        tokio::time::sleep(PING).await;
        scene.client.write_all(b"ping").await.unwrap();
        let mut read = [0; 4];
        scene.etcd.read_exact(&mut read).await.unwrap();
        tokio::time::sleep(PING).await;
        scene.etcd.write_all(b"pong").await.unwrap();
        scene.client.read_exact(&mut read).await.unwrap();
        assert_eq!(&read, b"pong");
        assert_eq!(scene.copying.await.unwrap(), 2 * PING + IDLE_TIMEOUT);
    }

    #[tokio::test(start_paused = true)]
    async fn websocket_whose_client_does_not_read_is_closed_although_it_sends() {
        let Scene {
            mut client,
            etcd,
            copying,
        } = Scene::start();
        let (mut from_client, mut to_client) = tokio::io::split(etcd);
        let sending = async { while to_client.write_all(b"event").await.is_ok() {} };
        let pinging = async {
            while client.write_all(b"ping").await.is_ok() {
                let _ = from_client.read(&mut [0; 64]).await;
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        };
        let (ended, ()) = tokio::join!(copying, async {
            tokio::select! {
                () = sending => {}
                () = pinging => {}
            }
        });
        assert_eq!(ended.unwrap(), UNREAD_TIMEOUT);
    }

    #[tokio::test]
    async fn client_that_closes_its_side_reads_the_rest() {
        let mut scene = Scene::start();
        scene.client.shutdown().await.unwrap();
        assert_eq!(scene.etcd.read(&mut [0; 4]).await.unwrap(), 0, "etcd learns it");
        scene.etcd.write_all(b"rest").await.unwrap();
        scene.etcd.shutdown().await.unwrap();
        let mut rest = Vec::new();
        scene.client.read_to_end(&mut rest).await.unwrap();
        assert_eq!(rest, b"rest");
        scene.copying.await.unwrap();
    }
}
