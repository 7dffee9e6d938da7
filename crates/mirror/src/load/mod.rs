//! Loads of a scope at one pinned revision: by RangeStream where etcd has it (KEP-5966), otherwise page by page.
//! After a broken connection the load continues behind the last key, at the same revision, on any endpoint whose history
//! holds the keys that have arrived.
//!
//! | file | subject |
//! |---|---|
//! | `begin` | what a load needs, and its first reads |
//! | `gather` | loads of everything |
//! | `adopt` | loads of what has changed since the mirror had its keys |
//! | `neighbour` | keys from another rangecache, for a start |
//! | `difference` | what differs, by keys and revisions |
//! | `whole` | comparison of all that came from a neighbour |
//! | `read` | the requests of a load |
//! | `loaded`, `error` | results |
//! | `cause` | causes of loads, for the metric and the log |
//! | `over_budget` | waiting until a mirror fits into memory again |

mod adopt;
mod begin;
mod cause;
mod difference;
mod error;
mod gather;
mod loaded;
mod neighbour;
pub(super) mod over_budget;
mod read;
mod whole;

pub(super) use begin::Load;
pub(super) use cause::LoadCause;
pub(super) use error::LoadError;
pub(super) use loaded::{Adopted, AdoptedFrom, Loaded, LoadedBy, Previous};

use adopt::adopt;
use gather::load_all;
use neighbour::ask_neighbours;
pub(super) use neighbour::check_neighbours;
use whole::compare_whole;

/// Loads on a dedicated connection. Of `previous`, what the mirror had before, or what a neighbour has, only what differs is
/// read; it is taken once everything has to be.
///
/// # Errors
/// [`LoadError`]; the keys that have arrived are dropped.
pub(super) async fn run(load: &Load<'_>, previous: &mut Option<Previous>) -> Result<Loaded, LoadError> {
    // What was dropped for a reason of its own is read from etcd alone.
    if previous.is_none() && !load.mirror.was_in_service() {
        *previous = ask_neighbours(load).await;
    }
    // Nothing to keep, and nothing that tells how large the values are.
    previous.take_if(|keys| keys.tree.is_empty());
    if let Some(keys) = previous {
        let mut adopted = adopt(load, keys).await;
        if keys.source == AdoptedFrom::Neighbour
            && let Ok(loaded) = &adopted
            && let Err(error) = compare_whole(load, loaded).await
        {
            adopted = Err(error);
        }
        match adopted {
            // A neighbour is no reason to try anything twice.
            Err(error) if error.may_be_avoided() || keys.source == AdoptedFrom::Neighbour => {
                tracing::info!(mirror = load.mirror.name, %error, "loading everything instead of what has changed");
                *previous = None;
            }
            adopted => return adopted,
        }
    }
    load_all(load).await
}

#[cfg(test)]
mod tests;
