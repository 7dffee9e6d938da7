//! Cost of many rangecaches to one etcd: a low rate of puts and, on each rangecache, linearizable reads; for
//! comparison the same reads are sent to etcd itself.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;

use crate::cases::{Suite, progress, puts};
use crate::client::{Connection, Windows};
use crate::dataset::Dataset;
use crate::load::{self, Op, Outcome};
use crate::measure::{Block, Series};
use crate::open_loop::open_loop;
use crate::processes::Process;
use crate::report::{Report, Row, Unit};
use crate::targets::{Kind, Setup};
use crate::usage::CpuSample;

const SIDECARS: [usize; 4] = [1, 4, 16, 32];
const PUTS_PER_SECOND: u32 = 200;
/// Reads through each rangecache, as long as all together are not more than [`GETS_PER_SECOND`].
const GETS_PER_SECOND_EACH: u32 = 500;
/// Reads that leave capacity on two cores.
const GETS_PER_SECOND: u32 = 2_000;
const BLOCK: Duration = Duration::from_secs(4);

/// Measures each fleet size, round by round, with and without the rangecaches: in front of etcd, and behind a hub.
pub(crate) async fn run(suite: &Suite) -> Result<Report> {
    let data = Dataset {
        prefix: "/registry/pods/",
        keys: 20_000,
        value_bytes: 1 << 10,
    };
    let setup = Setup::start(&suite.binaries, suite.options).await?;
    let etcd = setup.connect().await?;
    data.fill(&etcd, 0).await?;
    let mut gets = data.gets();
    load::learn(&etcd, &mut gets).await?;
    let gets = Arc::new(gets);
    let mut report = Report::default();
    for (count, is_behind_hub) in SIDECARS
        .into_iter()
        .flat_map(|count| [(count, false), (count, true)])
    {
        let (mut idle, mut reading) = (Series::new(), Series::new());
        let per_second = GETS_PER_SECOND_EACH.min(GETS_PER_SECOND / u32::try_from(count)?);
        for round in 0..suite.args.rounds {
            progress(&format!("{}, round {}", fleet(count, is_behind_hub), round + 1));
            let mut direct = Vec::new();
            for _ in 0..count {
                direct.push(setup.connect().await?);
            }
            let block = drive(&setup, &[], &etcd, &direct, &gets, 0).await?;
            idle.entry(Kind::Direct).or_default().push(block);
            let block = drive(&setup, &[], &etcd, &direct, &gets, per_second).await?;
            reading.entry(Kind::Direct).or_default().push(block);
            let (mut sidecars, mut through) = (Vec::new(), Vec::new());
            let hub = match is_behind_hub {
                true => Some(setup.start_rangecache(&[]).await?),
                false => None,
            };
            for _ in 0..count {
                let sidecar = match &hub {
                    Some(hub) => setup.start_leaf(hub).await?,
                    None => setup.start_rangecache(&[]).await?,
                };
                through.push(Arc::new(Connection::open(sidecar.address, Windows::LARGE).await?));
                sidecars.push(sidecar);
            }
            let block = drive(&setup, &sidecars, &etcd, &through, &gets, 0).await?;
            idle.entry(Kind::Rangecache).or_default().push(block);
            let block = drive(&setup, &sidecars, &etcd, &through, &gets, per_second).await?;
            reading.entry(Kind::Rangecache).or_default().push(block);
        }
        report.rows.extend(rows(count, is_behind_hub, idle, reading));
    }
    Ok(report)
}

fn fleet(count: usize, is_behind_hub: bool) -> String {
    let place = if is_behind_hub { " behind a hub" } else { "" };
    format!("{count} sidecars{place}")
}

fn rows(count: usize, is_behind_hub: bool, idle: Series, reading: Series) -> Vec<Row> {
    let etcd = |block: &Block| block.cpu_etcd_ns as f64 / block.seconds;
    let each = move |block: &Block| block.cpu_proxy_ns as f64 / block.seconds / count as f64;
    let row = |what: &str, series: &Series, figure: &dyn Fn(&Block) -> f64| {
        Row::of_series(
            "fleet",
            format!("{}, {what}", fleet(count, is_behind_hub)),
            Unit::Nanoseconds,
            series,
            figure,
            &[],
        )
    };
    let mut own = row("reading: CPU/s of each rangecache", &reading, &each);
    own.figures.remove(&Kind::Direct);
    let mut own_idle = row("idle: CPU/s of each rangecache", &idle, &each);
    own_idle.figures.remove(&Kind::Direct);
    let base = idle
        .get(&Kind::Direct)
        .and_then(|blocks| crate::report::Stat::of(blocks.iter().map(etcd)))
        .map_or(0.0, |stat| stat.median);
    let share = move |block: &Block| (etcd(block) - base) / count as f64;
    vec![
        row("idle: CPU/s of etcd", &idle, &etcd),
        own_idle,
        row("reading: CPU/s of etcd", &reading, &etcd).with_series(reading.clone()),
        row(
            "reading: CPU/s of etcd per rangecache, above none",
            &reading,
            &share,
        ),
        own,
        row("reading: GET p50", &reading, &|block| block.percentiles_ns[0]),
        row("reading: GET p99", &reading, &|block| block.percentiles_ns[1]),
    ]
}

/// Sends puts to etcd and optionally reads, spread over the connections; measures the CPU of etcd and of all
/// rangecaches.
async fn drive(
    setup: &Setup,
    sidecars: &[Process],
    etcd: &Arc<Connection>,
    readers: &[Arc<Connection>],
    gets: &Arc<Vec<Op>>,
    per_second_each: u32,
) -> Result<Block> {
    let write = {
        let etcd = etcd.clone();
        move |number: usize| {
            let (etcd, op) = (
                etcd.clone(),
                puts::put(&format!("/registry/leases/object-{:07}", number % 1000), 100),
            );
            async move { load::checked_call(&etcd, &op).await }
        }
    };
    let per_second = per_second_each * u32::try_from(readers.len())?;
    let read = {
        let (readers, gets) = (readers.to_vec(), gets.clone());
        async move {
            if per_second == 0 {
                return Ok(Outcome::default());
            }
            open_loop(per_second, BLOCK, move |number| {
                let (reader, gets) = (readers[number % readers.len()].clone(), gets.clone());
                async move {
                    let op = &gets[number % gets.len()];
                    // The header's revision grows with the puts, so that sizes differ slightly from etcd's response.
                    reader
                        .call(op.method, op.body.clone())
                        .await
                        .map_err(|error| error.to_string())
                }
            })
            .await
        }
    };
    let sample = || -> Result<Vec<CpuSample>> {
        let pids = [std::process::id(), setup.etcd.pid()]
            .into_iter()
            .chain(sidecars.iter().map(Process::pid));
        pids.map(CpuSample::of).collect()
    };
    let before = sample()?;
    let start = std::time::Instant::now();
    let (reads, writes) = tokio::join!(read, open_loop(PUTS_PER_SECOND, BLOCK, write));
    let (reads, writes) = (reads?, writes?);
    let seconds = start.elapsed().as_secs_f64();
    let used: Vec<u64> = sample()?
        .iter()
        .zip(&before)
        .map(|(now, before)| now.since(before))
        .collect();
    Ok(Block {
        calls: reads.calls,
        bytes: reads.bytes,
        errors: reads.errors + writes.errors,
        first_error: reads.first_error.clone().or(writes.first_error),
        seconds,
        percentiles_ns: [0.5, 0.99, 0.999].map(|share| match reads.calls {
            0 => f64::NAN,
            _ => reads.percentile_ns(share) as f64,
        }),
        cpu_client_ns: used[0],
        cpu_etcd_ns: used[1],
        cpu_proxy_ns: used[2..].iter().sum(),
        extra: BTreeMap::new(),
        beside: None,
    })
}
