//! Flags and environment variables, checked before a port is bound.
//!
//! A room's flags are a struct in its file `flags`; [`Config`] composes them. The environment variable of a
//! flag is `RANGECACHE_` and its long name ([`with_environment`]). Uses those rooms,
//! `net` and `memory`.
//!
//! | file | contents |
//! |---|---|
//! | `flags` | [`Config`]: all flags of serving, the checks across them, and TLS of both sides |
//! | `flags_file` | the file that `--flags-file` names |
//! | `live` | the flags that a reload changes while the process runs |
//! | `requests` | requests to reload them |
//! | `environment` | names of environment variables, those that are unknown; the effective settings as text |
//! | [`bounds`] | the list of bounds that flags set |

#![cfg_attr(not(test), deny(clippy::disallowed_methods, clippy::disallowed_types))]

pub mod bounds;
mod environment;
mod flags;
mod flags_file;
#[cfg(any(test, fuzzing, feature = "testing"))]
pub mod fuzzing;
mod live;
mod requests;

pub use environment::{
    FlagOrigin, Setting, UnknownVariable, check_names, effective, given, settings, with_environment,
};
pub use flags::{Config, ConfigError, FileConfig, FileFlagError, ProcessConfig};
pub use flags_file::{FlagsFile, FlagsFileError, summary};
pub use live::{LiveConfig, RELOADABLE, Reloadable};
pub use requests::{ReloadHandle, ReloadReply, ReloadRequests, Reloaded, reload_channel};
