//! Faults that tests inject into a running rangecache: only in builds with debug assertions, and only if the
//! environment sets `RANGECACHE_TEST_FAULTS`. Release builds contain none of it.
//!
//! A request with the metadata `rangecache-test-fault: NAME` arms a fault; the code that the fault concerns triggers
//! it, once. Mirrors carry out theirs at once: `leave-out` leaves all values of all mirrors out, `corrupt` removes a key
//! from each. Uses `simulated`.

/// A fault that a request can arm; the name in the metadata is at the end of each line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The request that names it panics: `request`.
    Request,
    /// The body of the response to the request that names it panics: `body`.
    Body,
    /// The next response to a feed panics its mirror's task: `feed`.
    Feed,
    /// The next quorum check panics: `check`.
    Check,
    /// The next tick of the probe panics: `probe`.
    Probe,
    /// The next successful quorum check is not reported until `release`: `hold`.
    Hold,
    /// The next turn at the admin port is not given until `release`: `admin-turn`.
    AdminTurn,
    /// The thread that serves the request that names it serves nothing for an hour: `block`.
    Block,
}

#[cfg(debug_assertions)]
mod armed {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU16, Ordering};

    use tokio::sync::Notify;

    use super::Fault;

    static ARMED: AtomicU16 = AtomicU16::new(0);
    pub(super) static RELEASED: Notify = Notify::const_new();

    fn bit(fault: Fault) -> u16 {
        1 << fault as u8
    }

    /// Name of the fault that the request names; the caller has mirrors carry out theirs.
    pub fn named(headers: &http::HeaderMap) -> Option<&[u8]> {
        static ALLOWED: OnceLock<bool> = OnceLock::new();
        let name = headers.get("rangecache-test-fault")?;
        let is_allowed = crate::simulated::max_page_keys().is_some()
            || *ALLOWED.get_or_init(|| std::env::var_os("RANGECACHE_TEST_FAULTS").is_some());
        is_allowed.then(|| name.as_bytes())
    }

    /// Arms the fault with this name.
    pub fn arm(name: &[u8]) {
        let fault = match name {
            b"request" => Fault::Request,
            b"body" => Fault::Body,
            b"feed" => Fault::Feed,
            b"check" => Fault::Check,
            b"probe" => Fault::Probe,
            b"hold" => Fault::Hold,
            b"admin-turn" => Fault::AdminTurn,
            b"block" => Fault::Block,
            b"release" => return RELEASED.notify_one(),
            _ => return,
        };
        ARMED.fetch_or(bit(fault), Ordering::SeqCst);
    }

    /// Whether `fault` is armed. Disarms it.
    pub fn is_armed(fault: Fault) -> bool {
        ARMED.load(Ordering::Relaxed) & bit(fault) != 0
            && ARMED.fetch_and(!bit(fault), Ordering::SeqCst) & bit(fault) != 0
    }
}

#[cfg(debug_assertions)]
pub use armed::{arm, is_armed, named};

/// Panics if `fault` is armed.
#[inline]
#[allow(clippy::panic, reason = "the purpose of the fault")]
pub fn trip(fault: Fault) {
    #[cfg(debug_assertions)]
    if is_armed(fault) {
        panic!("a planted fault");
    }
    #[cfg(not(debug_assertions))]
    let _ = fault;
}

/// Keeps the thread for an hour if `fault` is armed.
#[inline]
#[allow(clippy::disallowed_methods, reason = "the purpose of the fault")]
pub fn block(fault: Fault) {
    #[cfg(debug_assertions)]
    if is_armed(fault) {
        tracing::info!("blocked by a planted fault");
        std::thread::sleep(std::time::Duration::from_secs(3600));
    }
    #[cfg(not(debug_assertions))]
    let _ = fault;
}

/// Waits for the request `release` if `fault` is armed.
#[allow(clippy::unused_async, reason = "release builds do not wait")]
pub async fn hold(fault: Fault) {
    #[cfg(debug_assertions)]
    if is_armed(fault) {
        tracing::info!("held by a planted fault");
        armed::RELEASED.notified().await;
    }
    #[cfg(not(debug_assertions))]
    let _ = fault;
}
