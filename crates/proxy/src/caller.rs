//! Caller of one connection's calls, in the registry of clients.

use std::sync::Arc;

use arc_swap::ArcSwap;
use etcd_wire::grpc::metadata::{CREDENTIALS, HeadFields};
use http::{HeaderMap, header::USER_AGENT};
use rangecache_base::telemetry::clients::{
    ClientCall, ClientHandle, ClientKind, ClientName, ClientRegistry, ClientStats,
};
use rangecache_edge::limits::ClientAccount;

/// Agent of another rangecache: what it forwards has the agents of its clients.
const RANGECACHE: &str = "rangecache";

/// Client of one connection. With a certificate, every call is that client's; otherwise a call with a token is that of
/// the token's user, if etcd issued the token through this process.
#[derive(Debug)]
pub(super) struct Caller {
    connection: ClientHandle,
    /// Client of the last call: the same for all calls of most connections.
    current: ArcSwap<Current>,
}

#[derive(Debug)]
struct Current {
    has_agent: bool,
    /// Hash of the token.
    token: Option<u64>,
    /// User of the token; `None` if it is not known.
    user: Option<ClientHandle>,
}

impl Caller {
    /// Client of a connection with this name.
    pub(super) fn new(clients: &ClientRegistry, name: &ClientName) -> Caller {
        Caller {
            connection: clients.connect(name),
            current: ArcSwap::from_pointee(Current {
                has_agent: false,
                token: None,
                user: None,
            }),
        }
    }

    /// Client of the connection, whatever user makes its calls.
    pub(super) fn of_connection(&self) -> &Arc<ClientStats> {
        &self.connection
    }

    /// Begins a call with these `headers`, which say `fields`, on the connection with this `account`, and counts what was received for it.
    pub(super) fn begin(
        &self,
        clients: &ClientRegistry,
        account: &Arc<ClientAccount>,
        fields: &HeadFields,
        headers: &HeaderMap,
    ) -> ClientCall {
        let token = if fields.has_credentials {
            self.token_of(clients, headers)
        } else {
            None
        };
        let current = self.current.load();
        if current.has_agent && current.token == token {
            return received_on(account, self.client(&current).begin_call());
        }
        drop(current);
        let user = token.and_then(|token| clients.user_of(token));
        let current = Current {
            has_agent: true,
            token,
            user: user.map(|user| clients.connect(&user)),
        };
        let client = self.client(&current);
        if fields.is_of_rangecache {
            client.record_agent(RANGECACHE);
        } else if let Some(agent) = headers.get(USER_AGENT).and_then(|agent| agent.to_str().ok()) {
            client.record_agent(agent);
        }
        account.set_client(client.number());
        let call = client.begin_call();
        self.current.store(Arc::new(current));
        received_on(account, call)
    }

    fn client<'a>(&'a self, current: &'a Current) -> &'a Arc<ClientStats> {
        current.user.as_ref().unwrap_or(&self.connection)
    }

    /// Hash of the call's token; `None` if the certificate decides, and without a token.
    fn token_of(&self, clients: &ClientRegistry, headers: &HeaderMap) -> Option<u64> {
        if self.connection.name().kind() == ClientKind::Certificate {
            return None;
        }
        let token = CREDENTIALS.iter().find_map(|name| headers.get(*name))?;
        Some(clients.hash_token(token.as_bytes()))
    }
}

/// `call`, for which the bytes are counted that were received on the connection with this `account`.
fn received_on(account: &ClientAccount, call: ClientCall) -> ClientCall {
    call.client().record_received(account.take_received());
    call
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;
    use crate::call::testing::account;

    fn headers(token: Option<&'static str>) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(USER_AGENT, HeaderValue::from_static("etcdctl"));
        if let Some(token) = token {
            headers.insert("token", HeaderValue::from_static(token));
        }
        headers
    }

    /// Names of the clients that make calls with these tokens on one connection.
    fn callers(name: &ClientName, tokens: &[Option<&'static str>]) -> Vec<String> {
        let clients = ClientRegistry::default();
        clients.record_token(b"issued", "alice");
        let account = account(1 << 20);
        let caller = Caller::new(&clients, name);
        let name_of = |token: &Option<&'static str>| {
            let headers = headers(*token);
            let call = caller.begin(&clients, &account, &HeadFields::of(&headers), &headers);
            let client = call.client();
            assert_eq!(&*client.figures().agent, "etcdctl");
            client.name().to_string()
        };
        tokens.iter().map(name_of).collect()
    }

    #[test]
    fn call_with_an_issued_token_is_that_of_its_user() {
        let name = ClientName::of_connection(None, None);
        let tokens = [None, Some("issued"), Some("issued"), Some("guessed"), None];
        let unix = "unix unix";
        assert_eq!(
            callers(&name, &tokens),
            [unix, "user alice", "user alice", unix, unix]
        );
    }

    #[test]
    fn certificate_decides_whatever_token_a_call_has() {
        let name = ClientName::of_connection(Some("apiserver"), None);
        assert_eq!(callers(&name, &[Some("issued")]), ["certificate apiserver"]);
    }
}
