//! Loads of a whole fleet: many rangecaches start at once in front of one cluster, while another client reads from it.
//!
//! In production the sidecars are on other machines than etcd and the client. Here they run at the lowest CPU priority, so
//! that the client's latency shows what they do to etcd, and not that they need a processor themselves.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::args::{FleetLoad, LoadSource};
use crate::cases::{Suite, progress};
use crate::client::{Connection, Windows};
use crate::dataset::Dataset;
use crate::http1;
use crate::load::{self, Op, Outcome};
use crate::open_loop::open_loop;
use crate::processes::{self, Binaries, Endpoint, Process};
use crate::usage::CpuSample;

/// Length of the measurement before the loads.
const BEFORE: Duration = Duration::from_secs(5);
/// Length of the measurements during the loads, which follow each other.
const SLICE: Duration = Duration::from_secs(1);

/// The other client: reads of single keys, from each member in turn.
#[derive(Clone)]
struct Reader {
    connections: Arc<Vec<Connection>>,
    gets: Arc<Vec<Op>>,
    per_second: u32,
}

impl Reader {
    async fn read(&self, duration: Duration) -> Result<Outcome> {
        if self.per_second == 0 {
            tokio::time::sleep(duration).await;
            return Ok(Outcome::default());
        }
        let reader = self.clone();
        open_loop(self.per_second, duration, move |number| {
            let reader = reader.clone();
            async move {
                let connection = &reader.connections[number % reader.connections.len()];
                load::checked_call(connection, &reader.gets[number % reader.gets.len()]).await
            }
        })
        .await
    }

    /// Reads until `is_over`; returns the p99 of each slice, too, in milliseconds.
    async fn read_until(&self, is_over: &AtomicBool) -> Result<(Outcome, Vec<f64>)> {
        let (mut sum, mut slices) = (Outcome::default(), Vec::new());
        while !is_over.load(Ordering::Relaxed) {
            let slice = self.read(SLICE).await?;
            slices.push(slice.percentile_ns(0.99) as f64 / 1e6);
            sum.merge(slice);
        }
        sum.latencies_ns.sort_unstable();
        Ok((sum, slices))
    }
}

/// Measures each round with rangecaches of its own, and prints one line for each.
pub(crate) async fn run(suite: &Suite, fleet: &FleetLoad) -> Result<()> {
    let data = Dataset {
        prefix: "/registry/pods/",
        keys: fleet.megabytes * 1_000_000 / fleet.value_bytes,
        value_bytes: fleet.value_bytes,
    };
    let folder = tempfile::Builder::new().prefix("rangecache-bench-").tempdir()?;
    let binaries = &Binaries {
        // At the lowest priority, because all share the machine with etcd.
        rangecache_under: ["nice", "-n", "19"].map(str::to_owned).to_vec(),
        ..suite.binaries.clone()
    };
    let options = suite.options;
    let members = processes::start_cluster(binaries, folder.path(), fleet.members, options).await?;
    let mut connections = Vec::new();
    for member in &members {
        connections.push(Connection::open(member.address, Windows::LARGE).await?);
    }
    progress(&format!("filling {} keys", data.keys));
    let first = Arc::new(Connection::open(members[0].address, Windows::LARGE).await?);
    data.fill(&first, 0).await?;
    let mut gets = data.gets();
    load::learn(&first, &mut gets).await?;
    // The header names the member, whose ids have different lengths.
    gets.iter_mut().for_each(|get| get.expected_bytes = None);
    let reader = Reader {
        connections: Arc::new(connections),
        gets: Arc::new(gets),
        per_second: fleet.gets_per_second,
    };
    let endpoints: Vec<_> = members
        .iter()
        .map(|member| Endpoint {
            address: member.address,
            tls: None,
        })
        .collect();
    println!(
        "{} rangecaches load {} keys of {} bytes each from {} members; another client sends {} GETs a second",
        fleet.sidecars, data.keys, data.value_bytes, fleet.members, fleet.gets_per_second
    );
    let fleet_of = FleetOf {
        fleet,
        binaries,
        folder: folder.path(),
        members: &members,
        endpoints,
        reader,
    };
    for round in 0..suite.args.rounds {
        for source in &fleet.from {
            progress(&format!("round {}, {source:?}", round + 1));
            fleet_of.load(round, *source).await?;
        }
    }
    Ok(())
}

/// The parts of a measurement.
struct FleetOf<'a> {
    fleet: &'a FleetLoad,
    binaries: &'a Binaries,
    folder: &'a Path,
    members: &'a [Process],
    endpoints: Vec<Endpoint>,
    reader: Reader,
}

impl FleetOf<'_> {
    /// Starts all rangecaches at once, and prints what that costs.
    async fn load(&self, round: usize, source: LoadSource) -> Result<()> {
        let FleetOf {
            fleet,
            binaries,
            folder,
            members,
            reader,
            ..
        } = self;
        let start = async |endpoints: &[Endpoint], flags: &[&str]| {
            processes::start_rangecache(binaries, folder, endpoints, flags, &[]).await
        };
        let mut first = match source {
            LoadSource::Etcd => None,
            LoadSource::Neighbour | LoadSource::Hub => Some(start(&self.endpoints, &[]).await?),
        };
        if let Some(first) = &mut first {
            first.wait_ready().await?;
        }
        let first_url = first.as_ref().map(|first| format!("http://{}", first.address));
        let (endpoints, flags) = match (source, &first, &first_url) {
            (LoadSource::Neighbour, _, Some(url)) => (self.endpoints.clone(), vec!["--warm-from", url]),
            (LoadSource::Hub, Some(hub), _) => {
                let hub = Endpoint {
                    address: hub.address,
                    tls: None,
                };
                (vec![hub], Vec::new())
            }
            _ => (self.endpoints.clone(), Vec::new()),
        };
        let before = reader.read(BEFORE).await?;
        let pids: Vec<_> = members.iter().map(Process::pid).collect();
        let sample = || -> Result<Vec<CpuSample>> { pids.iter().map(|pid| CpuSample::of(*pid)).collect() };
        let (cpu, sent_before) = (sample()?, self.sent_bytes().await?);
        let is_over = Arc::new(AtomicBool::new(false));
        let reading = {
            let (reader, is_over) = (reader.clone(), is_over.clone());
            tokio::spawn(async move { reader.read_until(&is_over).await })
        };
        let began = Instant::now();
        let mut loads = tokio::task::JoinSet::new();
        for _ in 0..fleet.sidecars {
            let launched = start(&endpoints, &flags).await?;
            loads.spawn(async move {
                let mut process = launched;
                process.wait_ready().await?;
                Ok::<_, anyhow::Error>((began.elapsed(), process))
            });
        }
        // Kept, so that their ends are not part of the measurement.
        let (mut ready, mut processes) = (Vec::new(), Vec::new());
        while let Some(loaded) = loads.join_next().await {
            let (elapsed, process) = loaded??;
            ready.push(elapsed.as_secs_f64());
            processes.push(process);
        }
        let loads = Loads {
            seconds: began.elapsed().as_secs_f64(),
            ready,
            sent_bytes: self.sent_bytes().await? - sent_before,
            etcd_cpu: sample()?
                .iter()
                .zip(&cpu)
                .map(|(now, before)| format!("{:.1}", now.since(before) as f64 / 1e9))
                .collect(),
        };
        is_over.store(true, Ordering::Relaxed);
        let (during, slices) = reading.await??;
        drop(processes);
        print(
            &format!("round {}, {source:?}", round + 1),
            &before,
            &during,
            &loads,
        );
        let slices: Vec<_> = slices.iter().map(|p99| format!("{p99:.0}")).collect();
        println!("  GET p99 of each second: {} ms", slices.join(" "));
        Ok(())
    }

    /// Bytes that all members have sent to clients, the responses to the reader among them.
    async fn sent_bytes(&self) -> Result<f64> {
        let mut sum = 0.0;
        for member in self.members {
            sum += http1::read_metric(member.address, "etcd_network_client_grpc_sent_bytes_total").await?;
        }
        Ok(sum)
    }
}

/// Cost of the loads of a fleet.
struct Loads {
    /// Time until all were ready.
    seconds: f64,
    /// Time until each was ready, in seconds.
    ready: Vec<f64>,
    /// Bytes that etcd has sent.
    sent_bytes: f64,
    /// CPU of each member, in seconds.
    etcd_cpu: Vec<String>,
}

fn print(what: &str, before: &Outcome, during: &Outcome, loads: &Loads) {
    let milliseconds = |outcome: &Outcome, share| outcome.percentile_ns(share) as f64 / 1e6;
    let (p99_before, p99_during) = (milliseconds(before, 0.99), milliseconds(during, 0.99));
    let ready: Vec<_> = loads
        .ready
        .iter()
        .map(|seconds| format!("{seconds:.1}"))
        .collect();
    println!(
        "{what}: GET p50 {:.2} → {:.2} ms, p99 {p99_before:.2} → {p99_during:.2} ms ({:.1}×), {} failed; all ready \
         after {:.1} s, each after {} s; etcd has sent {:.0} MB, CPU by member {} s",
        milliseconds(before, 0.5),
        milliseconds(during, 0.5),
        p99_during / p99_before,
        before.errors + during.errors,
        loads.seconds,
        ready.join(" "),
        loads.sent_bytes / 1e6,
        loads.etcd_cpu.join(" "),
    );
    if let Some(error) = before.first_error.as_ref().or(during.first_error.as_ref()) {
        println!("  {error}");
    }
}
