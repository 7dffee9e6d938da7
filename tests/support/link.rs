//! A TCP link to etcd that breaks: where a connection has carried so many bytes of answers, or when told to.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::AbortHandle;

/// See the module. Everything ends on drop.
pub struct Link {
    port: u16,
    state: Arc<State>,
    accepting: AbortHandle,
}

struct State {
    target: String,
    /// A connection that carries more bytes of answers is cut, until there are no cuts left.
    cut_after_bytes: u64,
    cuts_left: AtomicU64,
    cuts: AtomicU64,
    /// While it is false, new connections wait.
    open: watch::Sender<bool>,
    ended: watch::Sender<bool>,
}

impl Link {
    /// A link to `http://host:port` that cuts `cuts` connections, each after `cut_after_bytes` bytes of answers; then it
    /// stays closed until [`Link::open`].
    pub async fn to(url: &str, cut_after_bytes: u64, cuts: u64) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let state = Arc::new(State {
            target: url.strip_prefix("http://").unwrap().to_owned(),
            cut_after_bytes,
            cuts_left: AtomicU64::new(cuts),
            cuts: AtomicU64::new(0),
            open: watch::Sender::new(true),
            ended: watch::Sender::new(false),
        });
        let of_task = Arc::clone(&state);
        let accepting = tokio::spawn(async move {
            loop {
                let (client, _) = listener.accept().await.unwrap();
                tokio::spawn(carry(client, Arc::clone(&of_task)));
            }
        });
        Self {
            port,
            state,
            accepting: accepting.abort_handle(),
        }
    }

    /// What stands for etcd's URL.
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// How many connections were cut.
    pub fn cuts(&self) -> u64 {
        self.state.cuts.load(Ordering::SeqCst)
    }

    /// Lets new connections through again.
    pub fn open(&self) {
        self.state.open.send_replace(true);
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.accepting.abort();
        self.state.ended.send_replace(true);
    }
}

async fn carry(client: TcpStream, state: Arc<State>) {
    let (mut open, mut ended) = (state.open.subscribe(), state.ended.subscribe());
    let carrying = async {
        open.wait_for(|open| *open).await.ok()?;
        let server = TcpStream::connect(&state.target).await.ok()?;
        client.set_nodelay(true).ok()?;
        server.set_nodelay(true).ok()?;
        let (mut requests, mut answers) = client.into_split();
        let (mut from_server, mut to_server) = server.into_split();
        let upwards = tokio::io::copy(&mut requests, &mut to_server);
        let downwards = async {
            let (mut buffer, mut carried) = (vec![0; 64 << 10], 0);
            loop {
                let read = from_server.read(&mut buffer).await.ok()?;
                if read == 0 {
                    return None;
                }
                carried += read as u64;
                let left = |left: u64| left.checked_sub(1);
                if carried > state.cut_after_bytes
                    && state
                        .cuts_left
                        .fetch_update(Ordering::SeqCst, Ordering::SeqCst, left)
                        .is_ok()
                {
                    state.open.send_replace(false);
                    state.cuts.fetch_add(1, Ordering::SeqCst);
                    return None::<()>;
                }
                answers.write_all(&buffer[..read]).await.ok()?;
            }
        };
        tokio::select! {
            _ = upwards => {}
            _ = downwards => {}
        }
        Some(())
    };
    tokio::select! {
        _ = carrying => {}
        _ = ended.wait_for(|ended| *ended) => {}
    }
}
