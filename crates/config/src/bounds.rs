//! The list of bounds that flags set: exported as `rangecache_limit`, and shown on the page next to what is used of
//! them.

use super::flags::Config;

/// Clients with figures of their own. No flag sets it: each takes less than a KiB.
pub const MAX_CLIENTS: usize = 1_024;

/// A bound that a flag sets.
#[derive(Debug)]
pub struct Bound {
    /// Flag, without its dashes.
    pub flag: &'static str,
    /// Value of the label `limit` of `rangecache_limit`: the flag with underscores; ends with the unit.
    pub name: &'static str,
    /// Unit of the value.
    pub unit: Unit,
    value: fn(&Config) -> f64,
}

/// Unit of a bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Bytes.
    Bytes,
    /// Seconds.
    Seconds,
    /// Connections, calls, threads, handshakes, or bytes per second.
    Count,
}

impl Bound {
    /// Value of the bound in `config`, in its unit.
    #[must_use]
    pub fn value(&self, config: &Config) -> f64 {
        (self.value)(config)
    }
}

/// Defines one static per bound, and the list of all of them.
macro_rules! bounds {
    ($($constant:ident, $flag:literal, $name:literal, $unit:ident, $value:expr;)*) => {
        $(
            #[doc = concat!("`--", $flag, "`.")]
            pub static $constant: Bound = Bound { flag: $flag, name: $name, unit: Unit::$unit, value: $value };
        )*
        /// Every bound.
        pub static ALL: &[&Bound] = &[$(&$constant),*];
    };
}

bounds! {
    CACHE_MAX_BYTES, "cache-max-bytes", "cache_max_bytes", Bytes,
        |config| bytes(config.mirror.max_bytes());
    HISTORY_MAX_BYTES, "history-max-bytes", "history_max_bytes", Bytes,
        |config| bytes(config.mirror.history_max_bytes);
    HISTORY_MAX_AGE, "history-max-age", "history_max_age_seconds", Seconds,
        |config| config.mirror.history_max_age.as_secs_f64();
    FRESHNESS_TIMEOUT, "freshness-timeout", "freshness_timeout_seconds", Seconds,
        |config| config.mirror.freshness_timeout.as_secs_f64();
    VERIFY_INTERVAL, "verify-interval", "verify_interval_seconds", Seconds,
        |config| config.mirror.verify_interval.as_secs_f64();
    CONNECT_TIMEOUT, "connect-timeout", "connect_timeout_seconds", Seconds,
        |config| config.etcd.connect_timeout.as_secs_f64();
    PROBE_INTERVAL, "probe-interval", "probe_interval_seconds", Seconds,
        |config| config.etcd.probe_interval.as_secs_f64();
    FORWARD_MAX_LARGE, "forward-max-large", "forward_max_large", Count,
        |config| f64::from(config.forward.max_large);
    FORWARD_MAX_SMALL, "forward-max-small", "forward_max_small", Count,
        |config| f64::from(config.forward.max_small);
    FORWARD_MAX_WAITING, "forward-max-waiting", "forward_max_waiting", Count,
        |config| f64::from(config.forward.max_waiting);
    STREAM_MAX_WAIT, "stream-max-wait", "stream_max_wait_seconds", Seconds,
        |config| config.forward.stream_max_wait.as_secs_f64();
    SERIES_TTL, "series-ttl", "series_ttl_seconds", Seconds,
        |config| config.forward.series_ttl.as_secs_f64();
    WATCH_PROGRESS_NOTIFY_INTERVAL, "watch-progress-notify-interval", "watch_progress_notify_interval_seconds", Seconds,
        |config| config.watch.progress_notify_interval.as_secs_f64();
    WATCH_MAX_BYTES, "watch-max-bytes", "watch_max_bytes", Bytes,
        |config| bytes(config.watch.max_bytes());
    MAX_CONNECTIONS, "max-connections", "max_connections", Count,
        |config| f64::from(config.limits.max_connections());
    MAX_CONNECTIONS_PER_ADDRESS, "max-connections-per-address", "max_connections_per_address", Count,
        |config| f64::from(config.limits.connections_per_address());
    MAX_CONCURRENT_STREAMS, "max-concurrent-streams", "max_concurrent_streams", Count,
        |config| f64::from(config.limits.max_concurrent_streams);
    MAX_CALLS, "max-calls", "max_calls", Count,
        |config| f64::from(config.limits.max_calls);
    BUFFER_MAX_BYTES, "buffer-max-bytes", "buffer_max_bytes", Bytes,
        |config| bytes(config.buffer_max_bytes());
    REQUEST_TIMEOUT, "request-timeout", "request_timeout_seconds", Seconds,
        |config| config.limits.request_timeout.as_secs_f64();
    WORKER_THREADS, "worker-threads", "worker_threads", Count,
        |config| f64::from(u32::try_from(config.limits.worker_threads()).unwrap_or(u32::MAX));
    SHUTDOWN_TIMEOUT, "shutdown-timeout", "shutdown_timeout_seconds", Seconds,
        |config| config.limits.shutdown_timeout.as_secs_f64();
    TLS_HANDSHAKE_TIMEOUT, "tls-handshake-timeout", "tls_handshake_timeout_seconds", Seconds,
        |config| config.tls.tls_handshake_timeout.as_secs_f64();
    TLS_MAX_HANDSHAKES, "tls-max-handshakes", "tls_max_handshakes", Count,
        |config| f64::from(u32::try_from(config.max_handshakes()).unwrap_or(u32::MAX));
}

#[allow(clippy::cast_precision_loss, reason = "a gauge shows magnitudes")]
fn bytes(value: u64) -> f64 {
    value as f64
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, Parser};
    use rangecache_base::memory::MemoryLimit;
    use rangecache_edge::limits::{
        FIXED_BYTES, MIN_BUFFER_BYTES, connections_memory, default_buffer_bytes, default_connections,
        default_handshakes,
    };
    use rangecache_mirror::default_cache_bytes;
    use rangecache_proxy::default_watch_bytes;

    use super::*;

    #[test]
    fn alerts_and_dashboard_name_only_bounds_of_the_list() {
        for text in [
            include_str!("../../../charts/rangecache/files/alerts.yaml"),
            include_str!("../../../charts/rangecache/files/dashboard.json")
                .replace('\\', "")
                .as_str(),
        ] {
            let names = text.split("limit=\"").skip(1);
            let names: Vec<_> = names.filter_map(|rest| rest.split('"').next()).collect();
            assert!(!names.is_empty());
            for name in names {
                assert!(ALL.iter().any(|bound| bound.name == name), "{name}");
            }
        }
    }

    #[test]
    fn every_bound_has_a_flag_and_a_name_with_its_unit() {
        let command = Config::command();
        let config = Config::try_parse_from(["rangecache"]).unwrap();
        for bound in ALL {
            let flags = command.get_arguments().filter_map(clap::Arg::get_long);
            assert!(flags.into_iter().any(|flag| flag == bound.flag), "{bound:?}");
            let suffix = match bound.unit {
                Unit::Seconds => "_seconds",
                Unit::Bytes | Unit::Count => "",
            };
            assert_eq!(bound.name, format!("{}{suffix}", bound.flag.replace('-', "_")));
            assert_eq!(bound.unit == Unit::Bytes, bound.name.ends_with("_bytes"));
            assert!(bound.value(&config) > 0.0, "{bound:?}");
        }
    }

    #[test]
    fn default_bounds_together_stay_below_the_memory_limit() {
        for mib in [128, 256, 512, 1024, 2048, 16_384, 262_144] {
            let memory = mib << 20;
            let (cache, watches) = (
                default_cache_bytes(MemoryLimit::Group(memory)),
                default_watch_bytes(memory),
            );
            let buffers = default_buffer_bytes(memory, cache + watches);
            let waiting_calls = buffers / 8;
            let all = [
                cache,
                watches,
                buffers,
                waiting_calls,
                connections_memory(memory),
                FIXED_BYTES,
            ];
            assert!(all.iter().sum::<u64>() <= memory, "{mib} MiB: {all:?}");
        }
        assert_eq!(default_buffer_bytes(1 << 30, 1 << 30), MIN_BUFFER_BYTES);
        let defaults = |mib: u64| {
            let memory = mib << 20;
            let (cache, watches) = (
                default_cache_bytes(MemoryLimit::Group(memory)),
                default_watch_bytes(memory),
            );
            let buffers = default_buffer_bytes(memory, cache + watches);
            (
                [cache, watches, buffers].map(|bytes| bytes >> 20),
                default_connections(memory),
                default_handshakes(memory),
            )
        };
        assert_eq!(defaults(512), ([288, 32, 56], 256, 170));
        assert_eq!(defaults(2_048), ([1_440, 64, 192], 1_024, 256));
        assert_eq!(defaults(65_536), ([49_056, 64, 2_048], 16_384, 256));
    }
}
