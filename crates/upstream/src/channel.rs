//! A connection for tonic's clients: without an identity of its own, or as rangecache's own user.

use std::task::{Context, Poll};
use std::{pin::Pin, sync::Arc};

use http::{Request, Response, Uri};
use lean_h2::LeanError;

use super::connection::{Connection, SendFailure};
use super::outgoing::{BoxError, Outgoing};
use super::upstream_body::UpstreamBody;

/// Connection as a tower service, for tonic's clients.
#[derive(Clone, Debug)]
pub struct Channel {
    connection: Arc<Connection>,
    /// Whether calls carry the token of rangecache's own user.
    own_identity: bool,
}

impl Connection {
    /// Channel and origin for a tonic client. Calls carry only the credentials that their request has.
    #[must_use]
    pub fn channel(self: &Arc<Self>) -> (Channel, Uri) {
        self.channel_with(false)
    }

    /// Channel and origin for calls as rangecache's own user: never for a client's request.
    #[must_use]
    pub fn own_channel(self: &Arc<Self>) -> (Channel, Uri) {
        self.channel_with(true)
    }

    fn channel_with(self: &Arc<Self>, own_identity: bool) -> (Channel, Uri) {
        let channel = Channel {
            connection: Arc::clone(self),
            own_identity,
        };
        (channel, self.origin().clone())
    }
}

impl tower_service::Service<Request<tonic::body::Body>> for Channel {
    type Response = Response<UpstreamBody>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Response<UpstreamBody>, BoxError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, mut request: Request<tonic::body::Body>) -> Self::Future {
        let Channel {
            connection,
            own_identity,
        } = self.clone();
        Box::pin(async move {
            let token = if own_identity {
                connection.credentials().token().await
            } else {
                None
            };
            if let Some(token) = &token {
                request.headers_mut().insert("token", token.clone());
            }
            let response = match connection.lean() {
                Some(lean) => connection
                    .send_parts(lean, request)
                    .await?
                    .map(UpstreamBody::from),
                None => match connection.send(request.map(Outgoing::tonic)).await {
                    Ok((response, _in_flight)) => response,
                    Err(SendFailure::NotSent(_, error) | SendFailure::Lost(error)) => return Err(error),
                    Err(SendFailure::Full(_)) => return Err(LeanError::Full.into()),
                },
            };
            if own_identity {
                connection
                    .credentials()
                    .check_token_rejected(token.as_ref(), response.headers());
            }
            Ok(response)
        })
    }
}
