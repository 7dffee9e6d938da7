//! What becomes of calls when a connection to etcd ends in mid-call, and when etcd asks its clients to leave.

use std::sync::Mutex;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::BodyExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;

use super::*;

const SOON: Duration = Duration::from_secs(20);

type Server = h2::server::Connection<TcpStream, Bytes>;

/// Serves each connection by `serve`, which gets their number.
async fn server<F, Fut>(serve: F) -> Url
where
    F: Fn(usize, Server) -> Fut + Send + 'static,
    Fut: Future<Output = ()> + Send + 'static,
{
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        for n in 0.. {
            let (stream, _) = listener.accept().await.unwrap();
            let Ok(connection) = h2::server::handshake(stream).await else {
                continue;
            };
            tokio::spawn(serve(n, connection));
        }
    });
    format!("http://127.0.0.1:{port}").parse().unwrap()
}

fn upstream(url: &Url) -> (Arc<Upstream>, tokio_util::sync::DropGuard) {
    let stop = CancellationToken::new();
    let upstream = Upstream::start(
        std::slice::from_ref(url),
        &crate::tls::Connector::plaintext(),
        true,
        Credentials::new(None),
        &TaskTracker::new(),
        &stop,
    );
    (upstream, stop.drop_guard())
}

fn call(path: &str) -> Request<Outgoing> {
    let body = Outgoing::whole(Bytes::from_static(b"\0\0\0\0\0"));
    Request::post(path).body(body).unwrap()
}

/// A connection that is asked to leave (GOAWAY) finishes its calls; new ones go over a new connection.
#[tokio::test]
async fn a_connection_that_is_asked_to_leave_is_drained() {
    let (arrived, held) = oneshot::channel::<oneshot::Sender<()>>();
    let arrived = Arc::new(Mutex::new(Some(arrived)));
    let calls = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&calls);
    let url = server(move |n, mut connection| {
        let (arrived, calls) = (Arc::clone(&arrived), Arc::clone(&calls));
        async move {
            while let Some(Ok((request, mut respond))) = connection.accept().await {
                if request.uri().path() == "/quick" {
                    calls.lock().unwrap().push(n);
                    respond.send_response(Response::new(()), true).unwrap();
                } else if request.uri().path() == "/slow" {
                    calls.lock().unwrap().push(n);
                    connection.graceful_shutdown();
                    let (go_on, may_go_on) = oneshot::channel();
                    let arrived = arrived.lock().unwrap().take().unwrap();
                    arrived.send(go_on).unwrap();
                    tokio::spawn(async move {
                        may_go_on.await.unwrap();
                        respond.send_response(Response::new(()), true).unwrap();
                    });
                }
            }
        }
    })
    .await;
    let (upstream, _stop) = upstream(&url);
    let connection = upstream
        .connection(ConnectionClass::Check, Instant::now() + SOON)
        .await
        .unwrap();
    let slow = {
        let connection = Arc::clone(&connection);
        tokio::spawn(async move { connection.send(call("/slow")).await })
    };
    let go_on = held.await.unwrap();
    tokio::time::timeout(SOON, async {
        while connection.is_live() {
            tokio::task::yield_now().await;
        }
    })
    .await
    .expect("no new calls for it");
    let other = upstream
        .connection(ConnectionClass::Check, Instant::now() + SOON)
        .await
        .unwrap();
    assert!(other.send(call("/quick")).await.is_ok());
    go_on.send(()).unwrap();
    let (response, _) = slow.await.unwrap().expect("the call under way is answered");
    response.into_body().collect().await.unwrap();
    let seen = seen.lock().unwrap();
    assert!(
        seen[0] != seen[1],
        "the second call took a connection of its own: {seen:?}"
    );
}
