//! Loads of a scope at one pinned revision: by RangeStream where etcd has it (KEP-5966), otherwise page by page.
//! After a broken connection the load continues behind the last key, at the same revision, on any endpoint whose history
//! holds the keys that have arrived.
//!
//! | file | subject |
//! |---|---|
//! | `begin` | what a load needs, its first reads, causes and failures |
//! | `gather` | loads of everything |
//! | `have` | keys that need not be read, and the result |
//! | `adopt` | loads of what has changed since |
//! | `neighbour` | keys from another rangecache, for a start |
//! | `difference` | what differs, by keys and revisions |
//! | `read` | the requests of a load |

mod adopt;
mod begin;
mod difference;
mod gather;
mod have;
mod neighbour;
mod read;

use adopt::{adopt, is_continued};
use gather::load_all;
use neighbour::ask_neighbours;

pub(super) use begin::{Load, LoadCause, LoadError};
pub(super) use have::{Adopted, Have, Loaded, LoadedBy, Source};
pub(super) use neighbour::check_neighbours;

/// Brings a mirror to etcd's present keys, on a dedicated connection. Of what it has, or of what a neighbour has otherwise, only
/// the difference is read; `have` is taken once it is of no use. A feed proves the result before it is in service.
///
/// # Errors
/// [`LoadError`]; the keys that have arrived are dropped.
pub(super) async fn bring(load: &Load<'_>, have: &mut Option<Have>) -> Result<Loaded, LoadError> {
    if let Some(kept) = have.take_if(|have| have.verified && have.lineage.is_some()) {
        match is_continued(load, &kept).await {
            Ok(()) => return Ok(kept.continued()),
            Err(LoadError::Foreign) => {
                load.mirror.record_loading(0);
                let error = "it is of another cluster or history than etcd";
                tracing::info!(
                    mirror = load.mirror.name,
                    error = %error,
                    "the image is of no use and is discarded"
                );
            }
            Err(error) => {
                *have = Some(kept);
                // What has changed since is read.
                if !error.is_compaction() {
                    return Err(error);
                }
            }
        }
    }
    // What was dropped for a reason of its own is read from etcd alone.
    if have.is_none() && !load.mirror.was_in_service() {
        *have = ask_neighbours(load).await;
    }
    // Nothing to keep, and nothing that tells how large the values are.
    have.take_if(|have| have.anchor.tree.is_empty());
    if let Some(kept) = have {
        match adopt(load, kept).await {
            // What was never proven is no reason to try anything twice.
            Err(error) if error.may_be_avoided() || !kept.verified => {
                tracing::info!(mirror = load.mirror.name, %error, "loading everything instead of what has changed");
                *have = None;
            }
            adopted => return adopted,
        }
    }
    load_all(load).await
}

#[cfg(test)]
mod tests;
