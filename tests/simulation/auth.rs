//! etcd's auth in the model: who may read and write which keys, as one entry of the raft log after another says it, and what
//! the judge makes of it.

use testkit::grpc::{FAILED_PRECONDITION, INVALID_ARGUMENT, PERMISSION_DENIED, Status, UNAUTHENTICATED};
use testkit::pb::{RangeRequest, WatchCreateRequest, prefix_end};

use crate::caller::HALVES;

pub const AUTHENTICATE: &str = "/etcdserverpb.Auth/Authenticate";
pub const ENABLE: &str = "/etcdserverpb.Auth/AuthEnable";
pub const DISABLE: &str = "/etcdserverpb.Auth/AuthDisable";
/// Password of every user.
pub const PASSWORD: &str = "sesame";

/// A user of etcd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum User {
    /// rangecache's own: reads all keys, unless it has lost that right.
    Mirror,
    /// May do everything.
    All,
    /// Writes all keys, and reads the half that [`Auth::half`] names.
    Half,
}

impl User {
    const ALL: [User; 3] = [User::Mirror, User::All, User::Half];

    pub fn name(self) -> &'static str {
        match self {
            User::Mirror => "mirror",
            User::All => "all",
            User::Half => "half",
        }
    }

    /// The user of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|user| user.name() == name)
    }
}

/// The user of a token, and since when it is valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    pub user: User,
    /// Number of the history in which it was issued: a restore invalidates all tokens.
    pub history: usize,
    /// [`Auth::tokens`] when it was issued.
    pub tokens: u64,
}

impl Identity {
    /// Identity of a token that no member has issued.
    pub const UNKNOWN: Self = Self {
        user: User::Mirror,
        history: 0,
        tokens: 0,
    };

    /// The text of its token.
    pub fn token(self) -> String {
        format!("{}.{}.{}", self.user.name(), self.history, self.tokens)
    }

    /// The identity of a token that a member has issued.
    pub fn of(token: &str) -> Option<Self> {
        let mut parts = token.split('.');
        Some(Self {
            user: User::named(parts.next()?)?,
            history: parts.next()?.parse().ok()?,
            tokens: parts.next()?.parse().ok()?,
        })
    }
}

/// Right that a call needs.
#[derive(Clone, Debug)]
pub enum Needs {
    /// To read `[key, range_end)`, in etcd's meaning of both.
    Read(Vec<u8>, Vec<u8>),
    /// To write any key.
    Write,
    /// To change auth itself.
    Administer,
}

impl Needs {
    /// Right that a read needs.
    pub fn to_read(range: &RangeRequest) -> Self {
        Self::Read(range.key.clone(), range.range_end.clone())
    }

    /// Right that a watch needs.
    pub fn to_watch(create: &WatchCreateRequest) -> Self {
        Self::Read(create.key.clone(), create.range_end.clone())
    }
}

/// Why etcd refuses a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    NoToken,
    InvalidToken,
    /// Auth was changed between the begin of the call and its end.
    OldRevision,
    Denied,
    NotEnabled,
}

impl Refusal {
    const ALL: [Refusal; 5] = [
        Refusal::NoToken,
        Refusal::InvalidToken,
        Refusal::OldRevision,
        Refusal::Denied,
        Refusal::NotEnabled,
    ];

    /// etcd's text for it.
    pub fn message(self) -> &'static str {
        match self {
            Refusal::NoToken => "etcdserver: user name is empty",
            Refusal::InvalidToken => "etcdserver: invalid auth token",
            Refusal::OldRevision => "etcdserver: revision of auth store is old",
            Refusal::Denied => "etcdserver: permission denied",
            Refusal::NotEnabled => "etcdserver: authentication is not enabled",
        }
    }

    /// etcd's status for it.
    pub fn status(self) -> Status {
        let code = match self {
            Refusal::NoToken | Refusal::OldRevision => INVALID_ARGUMENT,
            Refusal::InvalidToken => UNAUTHENTICATED,
            Refusal::Denied => PERMISSION_DENIED,
            Refusal::NotEnabled => FAILED_PRECONDITION,
        };
        Status {
            code,
            message: self.message().to_owned(),
        }
    }

    /// The refusal of a status.
    pub fn of(status: &Status) -> Option<Self> {
        let found = Self::with_reason(&status.message)?;
        (found.status().code == status.code).then_some(found)
    }

    /// The refusal in the reason of a cancelled watch, which says more than the text.
    pub fn with_reason(reason: &str) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|refusal| reason.ends_with(refusal.message()))
    }

    /// Whether a new token may help.
    pub fn needs_token(self) -> bool {
        !matches!(self, Refusal::Denied | Refusal::NotEnabled)
    }
}

/// Caller as a member knows it.
#[derive(Clone, Copy, Debug)]
pub struct Info {
    user: User,
    /// [`Auth::revision`] then.
    revision: u64,
}

/// State of auth after one raft entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Auth {
    pub is_on: bool,
    /// Raised by each change.
    pub revision: u64,
    /// Raised whenever all tokens become invalid.
    pub tokens: u64,
    /// The half of the keys that [`User::Half`] may read.
    pub half: Option<usize>,
    /// Whether [`User::Mirror`] may read.
    pub mirror_reads: bool,
}

impl Auth {
    /// Auth that is off.
    pub const OFF: Self = Self {
        is_on: false,
        revision: 1,
        tokens: 0,
        half: Some(0),
        mirror_reads: true,
    };

    /// Switches auth. Tokens of before are no longer valid.
    pub fn switch(&mut self, is_on: bool) {
        if self.is_on != is_on {
            self.tokens += 1;
        }
        self.is_on = is_on;
    }

    /// Caller with the token of `identity` in history number `history`; `None` if auth is off, or without a token.
    pub fn identify(&self, identity: Option<Identity>, history: usize) -> Result<Option<Info>, Refusal> {
        let Some(identity) = identity.filter(|_| self.is_on) else {
            return Ok(None);
        };
        if (identity.history, identity.tokens) != (history, self.tokens) {
            return Err(Refusal::InvalidToken);
        }
        Ok(Some(Info {
            user: identity.user,
            revision: self.revision,
        }))
    }

    /// Whether a call of `info` may do what it `needs`.
    pub fn permit(&self, info: Option<Info>, needs: &[Needs]) -> Result<(), Refusal> {
        if !self.is_on || needs.is_empty() {
            return Ok(());
        }
        let info = info.ok_or(Refusal::NoToken)?;
        if info.revision < self.revision {
            return Err(Refusal::OldRevision);
        }
        let is_permitted = needs.iter().all(|needs| match (info.user, needs) {
            (User::All, _) | (User::Half, Needs::Write) => true,
            (User::Half, Needs::Read(key, range_end)) => self
                .half
                .is_some_and(|half| is_within(key, range_end, HALVES[half])),
            (User::Mirror, Needs::Read(..)) => self.mirror_reads,
            (User::Half | User::Mirror, _) => false,
        });
        is_permitted.then_some(()).ok_or(Refusal::Denied)
    }

    /// Whether a call with the token of `identity` may do what it `needs` in history number `history`.
    pub fn allows(&self, identity: Option<Identity>, history: usize, needs: &[Needs]) -> Result<(), Refusal> {
        self.permit(self.identify(identity, history)?, needs)
    }
}

/// Whether every key of `[key, range_end)` starts with `prefix`.
fn is_within(key: &[u8], range_end: &[u8], prefix: &str) -> bool {
    key.starts_with(prefix.as_bytes())
        && match range_end {
            b"" => true,
            b"\0" => false,
            end => end <= &prefix_end(prefix.as_bytes())[..],
        }
}
