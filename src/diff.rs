//! `rangecache diff`: compares the keys of two endpoints at one revision, such as those of etcd and of a rangecache in front
//! of it, or of two clusters.
//!
//! | file | subject |
//! |---|---|
//! | `flags` | flags of the command |
//! | `side` | one endpoint, read page by page |
//!
//! Both endpoints are read in key order, so that one page of each is in memory. Values are compared, and never printed.
//! This room imports `config`, `upstream`, `tls`, `cache` (entries), `keyspace` and `telemetry`; only `main` and `cli` import it.

mod flags;
mod side;

use std::cmp::Ordering;
use std::fmt;
use std::io::{self, Write as _};
use std::process::ExitCode;
use std::sync::Arc;

use tokio_util::task::TaskTracker;

use etcd_store::cache::Entry;
pub use flags::DiffConfig;
use rangecache_base::telemetry::Metrics;
use rangecache_upstream::Credentials;
use side::Side;

/// Exit code if the endpoints cannot be compared.
const NOT_COMPARED: u8 = 2;

/// A key that is not the same on both sides.
#[derive(Debug)]
struct KeyDifference {
    key: Vec<u8>,
    kind: DifferenceKind,
}

#[derive(Debug)]
enum DifferenceKind {
    OnlyA,
    OnlyB,
    /// Modification revisions of A and B.
    Differs(i64, i64),
}

impl fmt::Display for KeyDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let key = self.key.escape_ascii();
        match self.kind {
            DifferenceKind::OnlyA => write!(f, "only in A  {key}"),
            DifferenceKind::OnlyB => write!(f, "only in B  {key}"),
            DifferenceKind::Differs(a, b) if a == b => write!(f, "differs    {key}  (both modified at {a})"),
            DifferenceKind::Differs(a, b) => write!(f, "differs    {key}  (modified at {a} in A, {b} in B)"),
        }
    }
}

/// Result of a comparison.
#[derive(Debug)]
struct DiffSummary {
    revision: i64,
    /// Keys that were compared, those of one side alone included.
    keys: u64,
    differences: u64,
    /// Whether the comparison ended at the limit.
    is_cut: bool,
}

impl DiffSummary {
    /// Whether all keys are the same.
    fn is_equal(&self) -> bool {
        self.differences == 0
    }
}

impl fmt::Display for DiffSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DiffSummary {
            revision,
            keys,
            differences,
            is_cut,
        } = self;
        match (differences, is_cut) {
            (0, _) => write!(f, "equal: {keys} keys at revision {revision}"),
            (_, true) => write!(
                f,
                "different: {differences} of the first {keys} keys at revision {revision}; raise --limit for more"
            ),
            (_, false) => write!(
                f,
                "different: {differences} of {keys} keys at revision {revision}"
            ),
        }
    }
}

/// Compares two endpoints, and prints the keys that differ as they are found.
#[must_use]
pub fn run(options: &DiffConfig) -> ExitCode {
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else {
        return ExitCode::from(NOT_COMPARED);
    };
    // A reader that closes the pipe early is not an error.
    let compared = runtime.block_on(compare(options, |difference| {
        let _ = writeln!(io::stdout(), "{difference}");
    }));
    match compared {
        Ok(summary) if summary.keys == 0 => {
            let _ = writeln!(
                io::stderr(),
                "rangecache diff: neither endpoint has a key there at revision {}: nothing was compared; check --prefix",
                summary.revision
            );
            ExitCode::from(NOT_COMPARED)
        }
        Ok(summary) => {
            let _ = writeln!(io::stdout(), "{summary}");
            ExitCode::from(u8::from(!summary.is_equal()))
        }
        Err(error) => {
            let _ = writeln!(io::stderr(), "rangecache diff: {error}");
            ExitCode::from(NOT_COMPARED)
        }
    }
}

/// Compares the endpoints; passes each difference to `found`, as many as the limit permits.
///
/// # Errors
/// What prevents the comparison, in words.
async fn compare(options: &DiffConfig, mut found: impl FnMut(&KeyDifference)) -> Result<DiffSummary, String> {
    let connections = options.connections();
    // Throwaway registry; these metrics are discarded.
    let connector = connections
        .connector(&Arc::new(Metrics::new()))
        .map_err(|error| error.to_string())?;
    let account = connections.etcd.account().map_err(|error| error.to_string())?;
    let tasks = TaskTracker::new();
    let open = async |name, url| {
        // A token is valid on the cluster that has issued it.
        let credentials = Credentials::new(account.clone());
        Side::open(name, url, options, &connector, &credentials, &tasks).await
    };
    let mut a = open("A", &options.a).await?;
    let mut b = open("B", &options.b).await?;
    let newest = a.newest.min(b.newest);
    let revision = options.revision.unwrap_or(newest);
    if revision > newest {
        let behind = if a.newest < b.newest { &a } else { &b };
        return Err(format!("{behind} is at revision {newest}, below {revision}"));
    }
    a.revision = revision;
    b.revision = revision;
    let mut summary = DiffSummary {
        revision,
        keys: 0,
        differences: 0,
        is_cut: false,
    };
    loop {
        let order = match (a.peek().await?, b.peek().await?) {
            (None, None) => return Ok(summary),
            (Some(_), None) => Ordering::Less,
            (None, Some(_)) => Ordering::Greater,
            (Some(of_a), Some(of_b)) => of_a.key().cmp(of_b.key()),
        };
        let of_a = if order.is_le() { a.take() } else { None };
        let of_b = if order.is_ge() { b.take() } else { None };
        summary.keys += 1;
        if let Some(difference) = difference(of_a, of_b) {
            found(&difference);
            summary.differences += 1;
            if summary.differences == options.limit {
                summary.is_cut = a.peek().await?.is_some() || b.peek().await?.is_some();
                return Ok(summary);
            }
        }
    }
}

/// The difference between what both sides have of one key.
fn difference(a: Option<Entry>, b: Option<Entry>) -> Option<KeyDifference> {
    let (key, kind) = match (&a, &b) {
        (None, None) => return None,
        (Some(a), None) => (a.key(), DifferenceKind::OnlyA),
        (None, Some(b)) => (b.key(), DifferenceKind::OnlyB),
        (Some(a), Some(b)) if a.encoded().contiguous() == b.encoded().contiguous() => return None,
        (Some(a), Some(b)) => (
            a.key(),
            DifferenceKind::Differs(a.mod_revision(), b.mod_revision()),
        ),
    };
    Some(KeyDifference {
        key: key.to_vec(),
        kind,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use etcd_store::cache::testing::KeyValue;

    fn found(a: Option<&KeyValue>, b: Option<&KeyValue>) -> Option<String> {
        difference(a.map(KeyValue::entry), b.map(KeyValue::entry)).map(|difference| difference.to_string())
    }

    #[test]
    fn key_differs_if_any_field_does_and_its_value_is_never_printed() {
        let one = KeyValue::new("a\n1", 5, "secret");
        let later = KeyValue::new("a\n1", 7, "secret");
        let other = KeyValue::new("a\n1", 5, "changed");
        let leased = KeyValue {
            lease: 3,
            ..one.clone()
        };
        assert_eq!(found(None, None), None);
        assert_eq!(found(Some(&one), Some(&one)), None);
        assert_eq!(found(Some(&one), None).unwrap(), "only in A  a\\n1");
        assert_eq!(found(None, Some(&one)).unwrap(), "only in B  a\\n1");
        assert_eq!(
            found(Some(&one), Some(&later)).unwrap(),
            "differs    a\\n1  (modified at 5 in A, 7 in B)"
        );
        for same_revision in [&other, &leased] {
            let text = found(Some(&one), Some(same_revision)).unwrap();
            assert_eq!(text, "differs    a\\n1  (both modified at 5)");
        }
    }

    #[test]
    fn summary_says_what_was_compared_and_whether_there_is_more() {
        let summary = |differences, is_cut| DiffSummary {
            revision: 9,
            keys: 3,
            differences,
            is_cut,
        };
        assert!(summary(0, false).is_equal() && !summary(1, false).is_equal());
        assert_eq!(summary(0, false).to_string(), "equal: 3 keys at revision 9");
        assert_eq!(
            summary(2, false).to_string(),
            "different: 2 of 3 keys at revision 9"
        );
        assert_eq!(
            summary(2, true).to_string(),
            "different: 2 of the first 3 keys at revision 9; raise --limit for more"
        );
    }
}
