//! Flags and environment variables, checked before a port is bound.
//!
//! Each consumer's flags are a struct in a file of its own; [`Config`] composes them. The environment variable of a
//! flag is `RANGECACHE_` and its long name ([`with_environment`]). Uses `flags`, `net` and `memory` alone.
//!
//! | file | contents |
//! |---|---|
//! | `flags` | [`Config`]: all flags of serving, and the checks across them |
//! | `listen`, `mirror`, `forward`, `limits`, `clients`, `log`, `access_log`, `process` | the flags of one consumer |
//! | `tls` | TLS of both sides, of the flags of several rooms |
//! | `file`, `flags_file` | the flag `--flags-file`, and the file that it names |
//! | `live` | the flags that a reload changes while the process runs |
//! | `trace` | the share of traces |
//! | `environment` | names of environment variables, those that are unknown; the effective settings as text |
//! | [`bounds`] | the list of bounds that flags set |

mod access_log;
pub mod bounds;
mod clients;
mod environment;
mod file;
mod flags;
mod flags_file;
mod forward;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod limits;
mod listen;
mod live;
mod log;
mod mirror;
mod process;
mod tls;
mod trace;
mod watch;

pub use access_log::AccessLogConfig;
pub use clients::ClientsConfig;
pub use environment::{
    Setting, Source, UnknownVariable, check_names, effective, given, settings, with_environment,
};
pub use file::FileConfig;
pub use flags::{Config, ConfigError};
pub use flags_file::{FlagsFile, FlagsFileError, summary};
pub use forward::{ForwardConfig, WhenBehind};
pub use limits::LimitsConfig;
pub use listen::{Control, ListenConfig};
pub use live::{LiveConfig, RELOADABLE, Reloadable};
pub use log::{LogConfig, LogFormat};
pub use mirror::MirrorConfig;
pub use process::ProcessConfig;
pub use watch::{WatchCache, WatchConfig};
