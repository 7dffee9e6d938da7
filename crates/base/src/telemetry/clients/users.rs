//! Names of etcd's users by their tokens, as etcd issued them through this process.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::time::Duration;

use moka::sync::Cache;

use super::name::ClientName;

/// Tokens that are kept; beyond it those that were not used for long are dropped.
const MAX_TOKENS: u64 = 16_384;
/// Time without a call after which a token is dropped. etcd's simple tokens expire after five minutes without a call.
const KEPT_FOR: Duration = Duration::from_secs(3600);

/// Users by the hash of their token. Tokens themselves are not kept; the hash has a random key.
#[derive(Debug)]
pub(super) struct Users {
    hasher: RandomState,
    names: Cache<u64, ClientName>,
}

impl Users {
    pub(super) fn new() -> Users {
        Users {
            hasher: RandomState::new(),
            names: Cache::builder()
                .max_capacity(MAX_TOKENS)
                .time_to_idle(KEPT_FOR)
                .build(),
        }
    }

    /// Hash under which a token is kept.
    pub(super) fn hash(&self, token: &[u8]) -> u64 {
        self.hasher.hash_one(token)
    }

    /// Records that etcd has issued `token` to `user`.
    pub(super) fn record(&self, token: &[u8], user: &str) {
        self.names.insert(self.hash(token), ClientName::of_user(user));
    }

    /// User of the token with this hash; `None` if it was not issued through this process.
    pub(super) fn get(&self, hash: u64) -> Option<ClientName> {
        self.names.get(&hash)
    }
}
