//! Resources of the process under the names that Prometheus' clients have in common, such as `process_cpu_seconds_total`.
//! They are read from `/proc` when the metrics are scraped.

use std::fmt;

use procfs::process::{LimitValue, Process};
use procfs::{ProcResult, WithCurrentSystemInfo as _};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::{counter::ConstCounter, gauge::ConstGauge};
use prometheus_client::registry::{Registry, Unit};

/// Registers the resources of this process; they have no series while `/proc` cannot be read.
pub(super) fn register_resources(registry: &mut Registry) {
    registry
        .sub_registry_with_prefix("process")
        .register_collector(Box::new(Resources));
}

#[derive(Debug)]
struct Resources;

/// Resources at the time of a scrape.
struct Usage {
    cpu_seconds: f64,
    resident_memory_bytes: f64,
    virtual_memory_bytes: f64,
    open_fds: f64,
    max_fds: f64,
    /// In seconds since 1970.
    start_time_seconds: f64,
    threads: f64,
}

impl Usage {
    #[allow(clippy::cast_precision_loss, reason = "samples are floats")]
    fn read() -> ProcResult<Usage> {
        let process = Process::myself()?;
        let stat = process.stat()?;
        let ticks_per_second = procfs::ticks_per_second() as f64;
        let started = stat.starttime as f64 / ticks_per_second;
        Ok(Usage {
            cpu_seconds: (stat.utime + stat.stime) as f64 / ticks_per_second,
            resident_memory_bytes: stat.rss_bytes().get() as f64,
            virtual_memory_bytes: stat.vsize as f64,
            open_fds: process.fd_count()? as f64,
            max_fds: match process.limits()?.max_open_files.soft_limit {
                LimitValue::Value(files) => files as f64,
                LimitValue::Unlimited => u64::MAX as f64,
            },
            start_time_seconds: procfs::boot_time_secs()? as f64 + started,
            threads: stat.num_threads as f64,
        })
    }
}

impl Collector for Resources {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let Ok(usage) = Usage::read() else {
            return Ok(());
        };
        let cpu = ConstCounter::new(usage.cpu_seconds);
        let help = "User and system CPU time";
        cpu.encode(encoder.encode_descriptor("cpu", help, Some(&Unit::Seconds), cpu.metric_type())?)?;
        for (name, unit, value, help) in [
            (
                "resident_memory",
                Some(Unit::Bytes),
                usage.resident_memory_bytes,
                "Resident memory",
            ),
            (
                "virtual_memory",
                Some(Unit::Bytes),
                usage.virtual_memory_bytes,
                "Virtual memory",
            ),
            ("open_fds", None, usage.open_fds, "Open file descriptors"),
            ("max_fds", None, usage.max_fds, "Limit on open file descriptors"),
            (
                "start_time",
                Some(Unit::Seconds),
                usage.start_time_seconds,
                "Start of the process, in seconds since 1970",
            ),
            ("threads", None, usage.threads, "Threads of the operating system"),
        ] {
            let gauge = ConstGauge::new(value);
            gauge.encode(encoder.encode_descriptor(name, help, unit.as_ref(), gauge.metric_type())?)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    fn value(text: &str, name: &str) -> f64 {
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix(&format!("{name} ")));
        line.unwrap_or_else(|| panic!("{name} not in\n{text}"))
            .parse()
            .unwrap()
    }

    #[test]
    fn resources_have_the_common_names_and_units() {
        let mut registry = Registry::default();
        register_resources(&mut registry);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
        let started = value(&text, "process_start_time_seconds");
        let age = now.as_secs_f64() - started;
        // The kernel rounds the time of boot to seconds.
        assert!((-2.0..86_400.0).contains(&age), "{age}");
        assert!(value(&text, "process_cpu_seconds_total") < 86_400.0);
        let resident = value(&text, "process_resident_memory_bytes");
        assert!(
            (1e6..=value(&text, "process_virtual_memory_bytes")).contains(&resident),
            "{resident}"
        );
        let open = value(&text, "process_open_fds");
        assert!((3.0..=value(&text, "process_max_fds")).contains(&open), "{open}");
        assert!(value(&text, "process_threads") >= 1.0);
    }
}
