//! Calls in flight while etcd closes their connection gracefully (GOAWAY).

use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::BodyExt;
use lean_h2::testing::{DATA, END_HEADERS, END_STREAM, HEADERS, OK, Peer, SETTINGS, WINDOW_UPDATE};
use rangecache_base::net::Url;
use tokio::net::{TcpListener, TcpStream};
use tokio::{sync::oneshot, time::Instant};

use super::fake::{Answer, FakeEtcd};
use super::testing::{SOON, start, status};
use super::{ConnectionClass, Outgoing};

type Server = h2::server::Connection<TcpStream, Bytes>;

/// Starts a server that handles each connection by `serve`, which gets the connection's number.
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

fn call(path: &str) -> Request<Outgoing> {
    let body = Outgoing::whole(Bytes::from_static(b"\0\0\0\0\0"));
    Request::post(path).body(body).unwrap()
}

/// A connection that received GOAWAY finishes its calls; new calls use a new connection, which is opened meanwhile.
#[tokio::test]
async fn connection_is_drained_after_goaway() {
    // Of hyper's client, and of the lean one.
    for class in [ConnectionClass::Authorization, ConnectionClass::Check] {
        Box::pin(drain_after_goaway(class)).await;
    }
}

async fn drain_after_goaway(class: ConnectionClass) {
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
                    let (proceed, may_proceed) = oneshot::channel();
                    let arrived = arrived.lock().unwrap().take().unwrap();
                    arrived.send(proceed).unwrap();
                    tokio::spawn(async move {
                        may_proceed.await.unwrap();
                        respond.send_response(Response::new(()), true).unwrap();
                    });
                }
            }
        }
    })
    .await;
    let (upstream, _stop) = start(&[&url], true);
    let connection = upstream.connection(class, Instant::now() + SOON).await.unwrap();
    assert_eq!(connection.lean().is_some(), class == ConnectionClass::Check);
    let slow = {
        let connection = Arc::clone(&connection);
        tokio::spawn(async move { connection.send(call("/slow")).await })
    };
    let proceed = held.await.unwrap();
    tokio::time::timeout(SOON, async {
        while connection.is_live() {
            tokio::task::yield_now().await;
        }
    })
    .await
    .expect("the connection takes no new calls");
    let other = upstream.connection(class, Instant::now() + SOON).await.unwrap();
    assert!(!slow.is_finished());
    assert!(other.send(call("/quick")).await.is_ok());
    proceed.send(()).unwrap();
    let (response, _) = slow.await.unwrap().expect("the call in flight gets its response");
    response.into_body().collect().await.unwrap();
    let seen = seen.lock().unwrap();
    assert!(
        seen[0] != seen[1],
        "the second call used another connection: {seen:?}"
    );
}

/// A member that hangs must not hold up what asks for its status: the health of endpoints, feeds and probes.
#[tokio::test]
async fn status_call_without_a_response_ends_with_deadline_exceeded() {
    let etcd = FakeEtcd::start(|_, _| std::future::pending::<Answer>()).await;
    let (upstream, _stop) = start(&[&etcd.url], true);
    let connection = upstream.connection(ConnectionClass::Check, Instant::now() + SOON);
    let connection = connection.await.unwrap();
    // Time now passes as soon as nothing else happens.
    tokio::time::pause();
    let began = Instant::now();
    let status = connection.member_status().await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::DeadlineExceeded, "{status:?}");
    assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
}

/// Plays a member that has announced `settings`, and that opens the window of a stream once it has read the request's head. Answers
/// each call with its status.
async fn play_member(stream: TcpStream, settings: &[u8]) {
    let mut peer = Peer::on(stream).await;
    peer.send(SETTINGS, 0, 0, settings).await;
    let answer = status("3.7.3", 7, 1, 1);
    let mut message = vec![0, 0, 0, 0, u8::try_from(answer.len()).unwrap()];
    message.extend(answer);
    loop {
        match peer.frame().await {
            (HEADERS, _, stream, _) => peer.send(WINDOW_UPDATE, 0, stream, &[0, 1, 0, 0]).await,
            (DATA, END_STREAM, stream, _) => {
                peer.send(HEADERS, END_HEADERS, stream, &OK).await;
                peer.send(DATA, 0, stream, &message).await;
                let trailers = b"\0\x0bgrpc-status\x010";
                peer.send(HEADERS, END_HEADERS | END_STREAM, stream, trailers)
                    .await;
            }
            _ => {}
        }
    }
}

/// Windows of 0, of less than a check has, and one call at once: what balancers announce.
#[tokio::test]
async fn peer_that_has_to_be_waited_for_answers_checks_and_the_reason_is_known() {
    for settings in [[0, 4, 0, 0, 0, 0], [0, 4, 0, 0, 0, 3], [0, 3, 0, 0, 0, 1]] {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let url: Url = format!("http://{}", listener.local_addr().unwrap())
            .parse()
            .unwrap();
        let accepting = tokio::spawn(async move {
            let mut members = tokio::task::JoinSet::new();
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                members.spawn(async move { play_member(stream, &settings).await });
            }
        });
        let (upstream, _stop) = start(&[&url], true);
        let answered = async {
            loop {
                let deadline = Instant::now() + SOON;
                let connection = upstream
                    .connection(ConnectionClass::Check, deadline)
                    .await
                    .unwrap();
                if connection.member_status().await.is_ok() && connection.lean().is_none() {
                    return;
                }
                tokio::task::yield_now().await;
            }
        };
        let answered = tokio::time::timeout(SOON, answered).await;
        answered.unwrap_or_else(|_| panic!("no check is answered: {settings:?}"));
        let last_error = &upstream.endpoints()[0].last_error;
        assert!(last_error.contains("announces"), "{last_error}");
        accepting.abort();
    }
}
