//! rangecache's own identity towards an etcd whose auth is on: the user of its mirrors, feeds, checks and probes. It is
//! that of `--user`, or with `--caller-is=certificate` the one that its certificate names.
//!
//! Clients' calls never carry this identity: they are sent with the client's own credentials. The password is sent to
//! Authenticate only, the token only with calls of [`Connection::own_channel`](super::Connection::own_channel);
//! neither is logged. A certificate, by contrast, is that of the connection, and so of every call on it that has no
//! token. [`authentication`](super::authentication) gets the token.

use std::{fmt, sync::Arc, time::Duration};

use http::{HeaderMap, HeaderValue};
use parking_lot::Mutex;
use rangecache_base::{instance::Instance, telemetry::clients::ClientName};
use rangecache_edge::tls::{Connector, warn_of_secret_open_to_others};
use tokio::sync::watch;

use super::flags::{Account, AccountError, CallerIs, EtcdConfig};

/// Time that a call waits for a token that is being requested. etcd takes some 100 ms for one, on purpose (bcrypt).
const TOKEN_TIMEOUT: Duration = Duration::from_secs(3);
/// etcd's messages, in a status or as the reason of a cancelled watch, for a missing or outdated token.
const TOKEN_REJECTED: [&str; 3] = [
    "user name is empty",
    "invalid auth token",
    "revision of auth store is old",
];

/// State of the token.
#[derive(Clone, Debug)]
pub(super) enum Token {
    /// No token is needed: auth was off when one was requested, or no user is configured.
    None,
    /// A token must be requested: at start, and after etcd rejected a call because of a missing token.
    Wanted,
    /// The current token.
    Have(HeaderValue),
    /// etcd rejected the user or the password; requested again after a pause.
    Refused,
}

/// Why mirrors cannot be maintained with rangecache's own user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UserProblem {
    /// etcd rejects user or password.
    Rejected {
        /// The user of `--user`.
        user: String,
        /// etcd's message.
        message: String,
    },
    /// The user may not read all of a scope.
    NoPermission {
        /// rangecache's own user.
        user: String,
        /// Flag that names the user.
        flag: &'static str,
        /// Name of the scope or mirror.
        scope: String,
    },
}

impl UserProblem {
    /// Returns the operator's remedy for the problem.
    #[must_use]
    pub fn remedy(&self) -> &'static str {
        match self {
            UserProblem::Rejected { .. } => "fix the user, or the password (--password, --password-file)",
            UserProblem::NoPermission { .. } => {
                "grant the user a role with read permission for that prefix (for all keys without --cache-prefix)"
            }
        }
    }
}

impl fmt::Display for UserProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            UserProblem::Rejected { user, message } => {
                write!(f, "etcd does not accept the user {user:?} of --user: {message}")
            }
            UserProblem::NoPermission { user, flag, scope } => {
                write!(f, "the user {user:?} of {flag} may not read all of {scope}")
            }
        }
    }
}

/// rangecache's own identity, user and token, shared by all connections.
#[derive(Debug)]
pub struct Credentials {
    pub(super) account: Option<Account>,
    /// Identity among rangecaches.
    instance: Instance,
    /// Common name of the client certificate, if that identifies rangecache and its callers.
    common_name: Option<String>,
    pub(super) token: watch::Sender<Token>,
    problem: Mutex<Option<UserProblem>>,
}

impl Credentials {
    /// Credentials that the flags give. `connector` has read the client certificate.
    ///
    /// # Errors
    /// Those of [`EtcdConfig::account`].
    pub fn open(config: &EtcdConfig, connector: &Connector) -> Result<Arc<Credentials>, AccountError> {
        if let Some(file) = &config.password_file {
            warn_of_secret_open_to_others("password-file", file);
        }
        Ok(match config.caller_is {
            CallerIs::Token => Credentials::new(config.account()?),
            CallerIs::Certificate => Credentials::of_certificate(connector.common_name()),
        })
    }

    /// Credentials of `account`; without one, rangecache's own calls are anonymous.
    #[must_use]
    pub fn new(account: Option<Account>) -> Arc<Credentials> {
        let token = if account.is_some() {
            Token::Wanted
        } else {
            Token::None
        };
        Arc::new(Credentials {
            account,
            instance: Instance::of_process(),
            common_name: None,
            token: watch::Sender::new(token),
            problem: Mutex::new(None),
        })
    }

    /// Credentials of the user whom the client certificate names: no call of rangecache's own has a token.
    fn of_certificate(common_name: Option<String>) -> Arc<Credentials> {
        Arc::new(Credentials {
            account: None,
            instance: Instance::of_process(),
            common_name,
            token: watch::Sender::new(Token::None),
            problem: Mutex::new(None),
        })
    }

    /// Identity among rangecaches.
    #[must_use]
    pub fn instance(&self) -> &Instance {
        &self.instance
    }

    /// Common name that identifies rangecache, and callers without a token (`--caller-is=certificate`). It does not
    /// change: the connector refuses a replaced certificate of another name.
    #[must_use]
    pub fn common_name(&self) -> Option<&str> {
        self.common_name.as_deref()
    }

    /// Whether the client with this `name` has proven by its certificate that it has the common name that identifies
    /// rangecache: etcd sees the client's own user in its calls without a token (`--caller-is=certificate`).
    #[must_use]
    pub fn is_own_name(&self, name: &ClientName) -> bool {
        self.common_name().is_some_and(|own| name.is_certificate(own))
    }

    /// Whether rangecache has a user of its own in an etcd whose auth is on: that of `--user` or of its certificate.
    #[must_use]
    pub fn name_a_user(&self) -> bool {
        self.is_configured() || self.common_name.is_some()
    }

    /// Whether `--user` is set.
    #[must_use]
    pub fn is_configured(&self) -> bool {
        self.account.is_some()
    }

    /// Name of rangecache's own user, for logs; empty without one.
    #[must_use]
    pub fn name(&self) -> &str {
        let account = self.account.as_ref().map(|account| account.name.as_str());
        account.or(self.common_name()).unwrap_or("")
    }

    /// The problem that rangecache's own user may not read all of a `scope`.
    #[must_use]
    pub fn no_permission(&self, scope: String) -> UserProblem {
        UserProblem::NoPermission {
            user: self.name().to_owned(),
            flag: self.flag(),
            scope,
        }
    }

    /// Flag that names rangecache's own user.
    fn flag(&self) -> &'static str {
        if self.common_name.is_some() {
            "--cert"
        } else {
            "--user"
        }
    }

    /// Whether etcd issued a token and has not rejected it since.
    #[must_use]
    pub fn have_token(&self) -> bool {
        matches!(*self.token.borrow(), Token::Have(_))
    }

    /// Whether etcd can attribute rangecache's own calls to its user: by a token, or by the certificate.
    #[must_use]
    pub fn identify(&self) -> bool {
        self.common_name.is_some() || self.have_token()
    }

    /// Whether etcd knows rangecache's own user and no permission was found missing.
    #[must_use]
    pub fn are_valid(&self) -> bool {
        self.identify() && self.problem.lock().is_none()
    }

    /// Requests a token if there is none: etcd's auth was found to be on.
    pub fn require_token(&self) {
        self.check_message(None, TOKEN_REJECTED[0]);
    }

    /// Requests a token at once if etcd rejected user or password: the password's file may have been corrected.
    pub fn look_again(&self) {
        self.token.send_if_modified(|token| {
            let is_refused = matches!(token, Token::Refused);
            if is_refused {
                *token = Token::Wanted;
            }
            is_refused
        });
    }

    /// Why mirrors cannot be maintained with this user.
    #[must_use]
    pub fn problem(&self) -> Option<UserProblem> {
        self.problem.lock().clone()
    }

    /// Records a problem, or with `None` that a probe found none; logs every change.
    pub fn set_problem(&self, problem: Option<UserProblem>) {
        let mut known = self.problem.lock();
        if *known == problem {
            return;
        }
        match &problem {
            Some(problem) => tracing::error!(
                user = self.name(),
                "{problem}; forwarding all reads until this is fixed: {}",
                problem.remedy()
            ),
            None => tracing::info!(
                user = self.name(),
                "etcd accepts the user of {} again",
                self.flag()
            ),
        }
        *known = problem;
    }

    /// Token for a call; waits for one that is being requested.
    pub(super) async fn token(&self) -> Option<HeaderValue> {
        self.account.as_ref()?;
        let mut token = self.token.subscribe();
        let settled = token.wait_for(|token| !matches!(token, Token::Wanted));
        match tokio::time::timeout(TOKEN_TIMEOUT, settled).await {
            Ok(Ok(token)) => match &*token {
                Token::Have(value) => Some(value.clone()),
                _ => None,
            },
            _ => None,
        }
    }

    /// Requests a new token if the response headers show that etcd rejected a call that was sent with the token `sent`.
    pub(super) fn check_token_rejected(&self, sent: Option<&HeaderValue>, response: &HeaderMap) {
        if self.account.is_none() {
            return;
        }
        // A response that is an error carries its status in its only headers.
        let code = response.get("grpc-status").map(HeaderValue::as_bytes);
        if !matches!(code, Some(b"3" | b"16")) {
            return;
        }
        if let Some(message) = response.get("grpc-message").and_then(|text| text.to_str().ok()) {
            self.check_message(sent, message);
        }
    }

    fn check_message(&self, sent: Option<&HeaderValue>, message: &str) {
        if !TOKEN_REJECTED.iter().any(|text| message.contains(text)) {
            return;
        }
        self.token.send_if_modified(|token| {
            // A call that was sent before the current token was issued says nothing about that token.
            let about_current = match (&*token, sent) {
                (Token::Have(current), Some(sent)) => current == sent,
                (Token::None, None) => self.account.is_some(),
                _ => false,
            };
            if about_current {
                *token = Token::Wanted;
            }
            about_current
        });
    }

    /// Requests a new token if `reason`, with which etcd cancelled a watch of this user, is a rejected token.
    pub fn check_watch_rejected(&self, reason: &str) {
        let sent = match &*self.token.borrow() {
            Token::Have(value) => Some(value.clone()),
            _ => None,
        };
        self.check_message(sent.as_ref(), reason);
    }
}

#[cfg(test)]
mod tests {
    use super::{super::flags::Secret, *};

    fn response(code: &'static str, message: &'static str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert("grpc-status", HeaderValue::from_static(code));
        headers.insert("grpc-message", HeaderValue::from_static(message));
        headers
    }

    fn with_user() -> Arc<Credentials> {
        Credentials::new(Some(Account {
            name: "mirror".into(),
            password: Secret::from("open sesame".to_owned()),
            password_file: None,
        }))
    }

    fn wants(credentials: &Credentials) -> bool {
        matches!(*credentials.token.borrow(), Token::Wanted)
    }

    #[test]
    fn token_is_requested_again_only_when_the_current_one_is_rejected() {
        let credentials = with_user();
        assert!(wants(&credentials), "at start");
        let (old, new) = (HeaderValue::from_static("old"), HeaderValue::from_static("new"));
        credentials.token.send_replace(Token::Have(new.clone()));
        credentials.check_token_rejected(Some(&old), &response("16", "etcdserver: invalid auth token"));
        credentials.check_token_rejected(None, &response("3", "etcdserver: user name is empty"));
        credentials.check_token_rejected(Some(&new), &response("7", "etcdserver: permission denied"));
        credentials.check_token_rejected(Some(&new), &response("3", "etcdserver: key is not provided"));
        assert!(!wants(&credentials));
        credentials.check_token_rejected(Some(&new), &response("16", "etcdserver: invalid auth token"));
        assert!(wants(&credentials));
        credentials.token.send_replace(Token::None);
        credentials.check_token_rejected(None, &response("3", "etcdserver: user name is empty"));
        assert!(wants(&credentials), "auth was switched on");
    }

    #[test]
    fn user_of_the_certificate_needs_no_token_and_is_named_in_its_problems() {
        let credentials = Credentials::of_certificate(Some("kube".to_owned()));
        assert!(credentials.name_a_user() && credentials.are_valid());
        assert!(!credentials.is_configured() && !credentials.have_token());
        credentials.set_problem(Some(credentials.no_permission("the mirror /".to_owned())));
        assert!(!credentials.are_valid());
        let text = credentials.problem().unwrap().to_string();
        assert_eq!(
            text,
            "the user \"kube\" of --cert may not read all of the mirror /"
        );
        let none = Credentials::new(None);
        assert!(!none.name_a_user() && !none.are_valid());
    }

    #[test]
    fn own_name_is_that_of_the_certificate_alone() {
        let client = ClientName::of_connection(Some("kube"), None);
        let own = Credentials::of_certificate(Some("kube".to_owned()));
        assert!(own.is_own_name(&client));
        assert!(!own.is_own_name(&ClientName::of_user("kube")));
        let other = Credentials::of_certificate(Some("kubelet".to_owned()));
        assert!(!other.is_own_name(&client));
        assert!(!Credentials::new(None).is_own_name(&client));
    }

    #[test]
    fn debug_output_does_not_show_the_password() {
        let credentials = with_user();
        assert!(!format!("{credentials:?}").contains("sesame"));
    }
}
