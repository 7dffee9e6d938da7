//! The flags that a reload changes while the process runs.

use std::sync::Arc;

use arc_swap::Guard;
use rangecache_base::flags::Live;
use rangecache_mirror::MirrorConfig;
use rangecache_proxy::ForwardConfig;

use super::{environment::Setting, flags::Config};

/// A flag that a reload changes. Every other one needs a restart.
#[derive(Debug)]
pub struct Reloadable {
    /// Flag, without its dashes.
    pub flag: &'static str,
    /// Copies the flag's value.
    copy: fn(&mut Config, &Config),
}

/// Defines the list of the flags that a reload changes.
macro_rules! reloadable {
    ($($flag:literal: $($field:ident).+;)*) => {
        /// Every flag that a reload changes.
        pub static RELOADABLE: &[Reloadable] = &[$(Reloadable {
            flag: $flag,
            copy: |to, from| to.$($field).+.clone_from(&from.$($field).+),
        }),*];
    };
}

reloadable! {
    "endpoints": etcd.endpoints;
    "fallback-endpoints": etcd.fallback_endpoints;
    "cache-prefix": mirror.cache_prefix;
    "no-cache-prefix": mirror.no_cache_prefix;
    "cache-max-bytes": mirror.cache_max_bytes;
    "cache-pack": mirror.cache_pack;
    "freshness-timeout": mirror.freshness_timeout;
    "serve-stale": mirror.serve_stale;
    "when-behind": forward.when_behind;
    "forward-max-large": forward.max_large;
    "forward-max-small": forward.max_small;
    "forward-max-waiting": forward.max_waiting;
    "max-calls": limits.max_calls;
    "shutdown-timeout": limits.shutdown_timeout;
    "log-level": log.level;
    "access-log-sample": access_log.sample;
    "trace-sample": trace.trace_sample;
}

/// The flags with which the process runs, as the last reload has left them. Cloning it copies references.
#[derive(Clone, Debug)]
pub struct LiveConfig {
    config: Live<Config>,
    /// Every flag with its value and where that comes from.
    settings: Live<Vec<Setting>>,
    /// Flags of the mirrors.
    pub mirror: Live<MirrorConfig>,
    /// Flags of forwarded reads.
    pub forward: Live<ForwardConfig>,
}

impl LiveConfig {
    /// The flags of the start.
    #[must_use]
    pub fn new(config: Config, settings: Vec<Setting>) -> LiveConfig {
        LiveConfig {
            mirror: Live::new(config.mirror.clone()),
            forward: Live::new(config.forward.clone()),
            config: Live::new(config),
            settings: Live::new(settings),
        }
    }

    /// Every flag with its value.
    #[must_use]
    pub fn settings(&self) -> Arc<Vec<Setting>> {
        self.settings.load_full()
    }

    /// The flags of now.
    #[must_use]
    pub fn load(&self) -> Guard<Arc<Config>> {
        self.config.load()
    }

    /// The flags of now, for longer than a moment.
    #[must_use]
    pub fn load_full(&self) -> Arc<Config> {
        self.config.load_full()
    }

    /// Takes over the flags of `new` that a reload may change; `settings` are all flags after it.
    pub fn reload(&self, new: &Config, settings: Vec<Setting>) {
        let mut config = Config::clone(&self.config.load());
        for flag in RELOADABLE {
            (flag.copy)(&mut config, new);
        }
        self.mirror.store(config.mirror.clone());
        self.forward.store(config.forward.clone());
        self.config.store(config);
        self.settings.store(settings);
    }
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory as _, Parser as _};

    use super::*;

    #[test]
    fn reload_changes_the_listed_flags_and_no_other() {
        let parse = |args: &[&str]| {
            Config::try_parse_from(std::iter::once("rangecache").chain(args.iter().copied())).unwrap()
        };
        let live = LiveConfig::new(parse(&[]), Vec::new());
        let new = parse(&["--max-calls=7", "--log-level=warn", "--max-connections=9"]);
        live.reload(&new, Vec::new());
        let now = live.load();
        assert_eq!(now.limits.max_calls, 7);
        assert_eq!(now.log.level, "warn");
        assert_eq!(now.limits.max_connections, None);
    }

    #[test]
    fn every_reloadable_flag_exists() {
        let command = Config::command();
        for reloadable in RELOADABLE {
            let mut flags = command.get_opts().filter_map(clap::Arg::get_long);
            assert!(flags.any(|flag| flag == reloadable.flag), "{}", reloadable.flag);
        }
    }
}
