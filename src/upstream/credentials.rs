//! Who rangecache itself is to an etcd whose auth is on: the user that its mirrors, feeds, checks and probes act as.
//!
//! Clients' calls never carry this identity: they go out with their callers' own credentials. The password goes to
//! Authenticate only, the token to the calls of [`Connection::own_channel`](super::Connection::own_channel) only; neither
//! is logged.

use std::sync::Arc;
use std::time::Duration;

use http::{HeaderMap, HeaderValue};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;
use tonic::Code;

use super::{Connection, ConnectionClass, Upstream};
use crate::config::Account;
use crate::etcdserverpb::AuthenticateRequest;
use crate::etcdserverpb::auth_client::AuthClient;

/// How long a call waits for a token that is being asked for. etcd takes some 100 ms for one, on purpose (bcrypt).
const TOKEN_PATIENCE: Duration = Duration::from_secs(3);
/// How long etcd may take for one.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// First pause before a token is asked for again that was not given.
const BACKOFF_FIRST: Duration = Duration::from_millis(200);
/// Longest such pause: each attempt costs etcd as much as thousands of reads.
const BACKOFF_LAST: Duration = Duration::from_secs(30);
/// What etcd says, in a status or as the reason of a cancelled watch, to who needs a token, or another one.
const TOKEN_TROUBLE: [&str; 3] = [
    "user name is empty",
    "invalid auth token",
    "revision of auth store is old",
];

/// What is known of the token.
#[derive(Clone, Debug)]
enum Token {
    /// Auth was off when it was asked for, or there is no user to ask as.
    None,
    /// It has to be asked for: at start, and when etcd refused a call for want of one.
    Wanted,
    /// etcd gave it.
    Have(HeaderValue),
    /// etcd refused the user or the password; asked for again after a pause.
    Refused,
}

/// The identity and its token, shared by all connections.
#[derive(Debug)]
pub struct Credentials {
    account: Option<Account>,
    token: watch::Sender<Token>,
    /// Why mirrors cannot be kept with this identity, in words for the operator.
    problem: Mutex<Option<String>>,
}

impl Credentials {
    /// Of `account`; `None` is nobody.
    #[must_use]
    pub fn new(account: Option<Account>) -> Arc<Credentials> {
        let token = if account.is_some() {
            Token::Wanted
        } else {
            Token::None
        };
        Arc::new(Credentials {
            account,
            token: watch::Sender::new(token),
            problem: Mutex::new(None),
        })
    }

    /// Whether there is a user at all.
    #[must_use]
    pub fn is_configured(&self) -> bool {
        self.account.is_some()
    }

    /// The user's name, for logs.
    #[must_use]
    pub fn name(&self) -> &str {
        self.account.as_ref().map_or("", |account| account.name.as_str())
    }

    /// Whether etcd gave a token that it has not refused since.
    #[must_use]
    pub fn are_known(&self) -> bool {
        matches!(*self.token.borrow(), Token::Have(_))
    }

    /// Whether etcd knows this identity, and no right was found missing.
    #[must_use]
    pub fn are_valid(&self) -> bool {
        self.are_known() && self.problem.lock().is_none()
    }

    /// etcd's auth was found to be on.
    pub fn are_needed(&self) {
        self.judge_text(None, TOKEN_TROUBLE[0]);
    }

    /// Why mirrors cannot be kept with this identity.
    #[must_use]
    pub fn problem(&self) -> Option<String> {
        self.problem.lock().clone()
    }

    /// A right is missing, or the user is not accepted; said in the log when it is news. `None`: all is well again, as
    /// the next beat of the pulse finds.
    pub fn set_problem(&self, problem: Option<String>) {
        let mut known = self.problem.lock();
        if *known == problem {
            return;
        }
        match &problem {
            Some(problem) => {
                tracing::error!(user = self.name(), "{problem}; reads are forwarded until then");
            }
            None => tracing::info!(
                user = self.name(),
                "etcd has nothing against the user of --user any more"
            ),
        }
        *known = problem;
    }

    /// The token for a call, waiting for one that is being asked for.
    pub(super) async fn token(&self) -> Option<HeaderValue> {
        self.account.as_ref()?;
        let mut token = self.token.subscribe();
        let settled = token.wait_for(|token| !matches!(token, Token::Wanted));
        match tokio::time::timeout(TOKEN_PATIENCE, settled).await {
            Ok(Ok(token)) => match &*token {
                Token::Have(value) => Some(value.clone()),
                _ => None,
            },
            _ => None,
        }
    }

    /// Looks whether etcd refused a call that went out with `sent` for want of a (newer) token: then one is asked for.
    pub(super) fn judge(&self, sent: Option<&HeaderValue>, answered: &HeaderMap) {
        if self.account.is_none() {
            return;
        }
        // An answer that is an error has its status in the only headers that it has.
        let code = answered.get("grpc-status").map(HeaderValue::as_bytes);
        if !matches!(code, Some(b"3" | b"16")) {
            return;
        }
        if let Some(message) = answered.get("grpc-message").and_then(|text| text.to_str().ok()) {
            self.judge_text(sent, message);
        }
    }

    fn judge_text(&self, sent: Option<&HeaderValue>, message: &str) {
        if !TOKEN_TROUBLE.iter().any(|trouble| message.contains(trouble)) {
            return;
        }
        self.token.send_if_modified(|token| {
            // A call that went out before the present token came says nothing of it.
            let about_this = match (&*token, sent) {
                (Token::Have(present), Some(sent)) => present == sent,
                (Token::None, None) => self.account.is_some(),
                _ => false,
            };
            if about_this {
                *token = Token::Wanted;
            }
            about_this
        });
    }

    /// etcd cancelled a watch of this identity's with `reason`.
    pub fn watch_refused(&self, reason: &str) {
        let sent = match &*self.token.borrow() {
            Token::Have(value) => Some(value.clone()),
            _ => None,
        };
        self.judge_text(sent.as_ref(), reason);
    }

    /// Asks for a token over `connection`, once: for who keeps no [`Upstream`].
    ///
    /// # Errors
    /// etcd's refusal of user or password, or that there was no answer.
    pub async fn authenticate_once(&self, connection: &Arc<Connection>) -> Result<(), tonic::Status> {
        let Some(account) = &self.account else {
            return Ok(());
        };
        let answer = authenticate(account, connection).await;
        self.token
            .send_replace(answer.as_ref().map_or(Token::Refused, Token::clone));
        answer.map(drop)
    }

    /// Asks for a token whenever one is wanted; runs until cancelled.
    pub(super) async fn keep(&self, upstream: &Upstream) {
        let Some(account) = &self.account else {
            return;
        };
        let mut changed = self.token.subscribe();
        let mut backoff = BACKOFF_FIRST;
        loop {
            if changed
                .wait_for(|token| matches!(token, Token::Wanted))
                .await
                .is_err()
            {
                return;
            }
            match authenticate_by(account, upstream).await {
                Ok(token) => {
                    if matches!(token, Token::Have(_)) {
                        tracing::info!(
                            user = account.name,
                            "etcd's auth is on: authenticated as the user of --user"
                        );
                    }
                    self.token.send_replace(token);
                    // A token that is refused again at once must not become a stream of Authenticate calls.
                    tokio::time::sleep(BACKOFF_FIRST).await;
                    backoff = BACKOFF_FIRST;
                }
                Err(status) if matches!(status.code(), Code::InvalidArgument | Code::FailedPrecondition) => {
                    self.set_problem(Some(format!(
                        "etcd does not accept the user {:?} of --user: {}; mend the user, or the password \
                         (--password, --password-file)",
                        account.name,
                        status.message()
                    )));
                    self.token.send_replace(Token::Refused);
                    tokio::time::sleep(backoff).await;
                    backoff = (backoff * 2).min(BACKOFF_LAST);
                    self.token.send_replace(Token::Wanted);
                }
                Err(status) => {
                    tracing::debug!(code = ?status.code(), message_of_etcd = status.message(), "etcd gave no token");
                    tokio::time::sleep(BACKOFF_FIRST).await;
                }
            }
        }
    }
}

async fn authenticate_by(account: &Account, upstream: &Upstream) -> Result<Token, tonic::Status> {
    let connection = upstream
        .connection(ConnectionClass::Check, Instant::now() + ANSWER_TIMEOUT)
        .await
        .map_err(|error| tonic::Status::unavailable(error.to_string()))?;
    authenticate(account, &connection).await
}

async fn authenticate(account: &Account, connection: &Arc<Connection>) -> Result<Token, tonic::Status> {
    let (channel, origin) = connection.channel();
    let mut client = AuthClient::with_origin(channel, origin);
    let request = AuthenticateRequest {
        name: account.name.clone(),
        password: account.password.expose().to_owned(),
    };
    let answer = tokio::time::timeout(ANSWER_TIMEOUT, client.authenticate(request))
        .await
        .map_err(|_| tonic::Status::deadline_exceeded("no token in time"))?;
    match answer {
        Ok(answer) => {
            let mut value = HeaderValue::try_from(answer.into_inner().token)
                .map_err(|_| tonic::Status::internal("etcd's token cannot be sent"))?;
            value.set_sensitive(true);
            Ok(Token::Have(value))
        }
        Err(status) if status.message().contains("authentication is not enabled") => Ok(Token::None),
        Err(status) => Err(status),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Secret;

    fn answered(code: &'static str, message: &'static str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert("grpc-status", HeaderValue::from_static(code));
        headers.insert("grpc-message", HeaderValue::from_static(message));
        headers
    }

    fn someone() -> Arc<Credentials> {
        Credentials::new(Some(Account {
            name: "mirror".into(),
            password: Secret::from("open sesame".to_owned()),
        }))
    }

    fn wants(credentials: &Credentials) -> bool {
        matches!(*credentials.token.borrow(), Token::Wanted)
    }

    #[test]
    fn a_refused_token_is_asked_for_anew_but_only_for_the_call_that_carried_it() {
        let credentials = someone();
        assert!(wants(&credentials), "at start");
        let (old, new) = (HeaderValue::from_static("old"), HeaderValue::from_static("new"));
        credentials.token.send_replace(Token::Have(new.clone()));
        credentials.judge(Some(&old), &answered("16", "etcdserver: invalid auth token"));
        credentials.judge(None, &answered("3", "etcdserver: user name is empty"));
        credentials.judge(Some(&new), &answered("7", "etcdserver: permission denied"));
        credentials.judge(Some(&new), &answered("3", "etcdserver: key is not provided"));
        assert!(!wants(&credentials));
        credentials.judge(Some(&new), &answered("16", "etcdserver: invalid auth token"));
        assert!(wants(&credentials));
        credentials.token.send_replace(Token::None);
        credentials.judge(None, &answered("3", "etcdserver: user name is empty"));
        assert!(wants(&credentials), "auth was switched on");
    }

    #[test]
    fn nothing_that_can_be_printed_shows_the_password() {
        let credentials = someone();
        assert!(!format!("{credentials:?}").contains("sesame"));
    }
}
