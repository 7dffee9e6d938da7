//! TLS on both sides, with real etcd.

mod both_sides;
mod handshakes;
mod refusals;
mod rotation;

use testkit::proxy::{Builder, Rangecache};
use testkit::tls::{Pair, text};
use testkit::wait::{SOON, until};

/// `--flag path` arguments for one side.
fn server_flags(pair: &Pair) -> Vec<String> {
    ["--cert-file", text(&pair.cert), "--key-file", text(&pair.key)]
        .map(str::to_owned)
        .into()
}

fn with_all(mut builder: Builder, flags: &[String]) -> Builder {
    for pair in flags.chunks(2) {
        builder = builder.with(&pair[0], &pair[1]);
    }
    builder
}

fn strs(flags: &[String]) -> Vec<&str> {
    flags.iter().map(String::as_str).collect()
}

/// Waits until a line of the log contains all of `parts`.
async fn logged(rangecache: &Rangecache, parts: &[&str]) {
    until(SOON, &format!("a log line with {parts:?}"), async || {
        let said = |line: &str| parts.iter().all(|part| line.contains(part));
        rangecache.log().lines().any(said).then_some(())
    })
    .await;
}
