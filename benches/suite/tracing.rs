//! Cost of tracing: GETs from memory, and rangecache's CPU time per call, without tracing and with it, in turns.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;

use crate::cases::{Suite, progress};
use crate::client::{Connection, Windows};
use crate::dataset::Dataset;
use crate::load::{self, Shape};
use crate::processes::Process;
use crate::report::Stat;
use crate::targets::Setup;
use crate::usage::CpuSample;

const BLOCK: Duration = Duration::from_millis(1500);
/// Variants: name, and share of the calls that are traced.
const VARIANTS: [(&str, Option<&str>); 4] = [
    ("without tracing", None),
    ("no call traced", Some("0")),
    ("1 % of calls traced", Some("0.01")),
    ("every call traced", Some("1")),
];

struct Variant {
    name: &'static str,
    process: Process,
    connections: Vec<Arc<Connection>>,
    cpu_per_get_ns: Vec<f64>,
    gets_per_second: Vec<f64>,
    errors: u64,
}

/// Starts one rangecache per variant, and drives them in turns.
pub(crate) async fn run(suite: &Suite) -> Result<()> {
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
    let collector = collect().await?;
    let mut variants = Vec::new();
    for (name, share) in VARIANTS {
        let environment = share.map(|share| {
            [
                ("OTEL_EXPORTER_OTLP_ENDPOINT", collector.as_str()),
                ("OTEL_TRACES_SAMPLER", "parentbased_traceidratio"),
                ("OTEL_TRACES_SAMPLER_ARG", share),
            ]
        });
        let environment = environment.as_ref().map_or(&[][..], |environment| environment);
        let process = setup.start_rangecache_with(&[], environment).await?;
        let connection = Connection::open(process.address, Windows::LARGE).await?;
        variants.push(Variant {
            name,
            process,
            connections: vec![Arc::new(connection)],
            cpu_per_get_ns: Vec::new(),
            gets_per_second: Vec::new(),
            errors: 0,
        });
    }
    let shape = Shape {
        connections: 1,
        in_flight: 64,
        duration: BLOCK,
        min_calls: 1,
    };
    // The first round is for warming up.
    for round in 0..=suite.args.rounds {
        progress(&format!("round {round} of {}", suite.args.rounds));
        // The order changes with each round.
        variants.rotate_left(1);
        for variant in &mut variants {
            let before = CpuSample::of(variant.process.pid())?;
            let outcome = load::closed_loop(&variant.connections, shape, &gets).await?;
            let used = CpuSample::of(variant.process.pid())?.since(&before);
            if round > 0 {
                variant.cpu_per_get_ns.push(used as f64 / outcome.calls as f64);
                let rate = outcome.calls as f64 / outcome.elapsed.as_secs_f64();
                variant.gets_per_second.push(rate);
            }
            variant.errors += outcome.errors;
        }
    }
    print(&variants);
    Ok(())
}

fn print(variants: &[Variant]) {
    let median = |figures: &[f64]| Stat::of(figures.iter().copied()).map_or(f64::NAN, |stat| stat.median);
    let base = variants.iter().find(|variant| variant.name == VARIANTS[0].0);
    // Compares adjacent rounds, so that disturbances affect both.
    let more = |variant: &Variant| {
        let base = base.map_or(&[][..], |base| &base.cpu_per_get_ns);
        let ratios: Vec<f64> = variant
            .cpu_per_get_ns
            .iter()
            .zip(base)
            .map(|(ours, base)| (ours / base - 1.0) * 100.0)
            .collect();
        median(&ratios)
    };
    println!("GETs from memory, 64 in flight on one connection, medians\n");
    println!("| | CPU per GET | more than without | GETs/s | errors |");
    println!("|---|---|---|---|---|");
    for (name, _) in VARIANTS {
        for variant in variants.iter().filter(|variant| variant.name == name) {
            println!(
                "| {name} | {:.2} µs | {:+.1} % | {:.1}k | {} |",
                median(&variant.cpu_per_get_ns) / 1e3,
                more(variant),
                median(&variant.gets_per_second) / 1e3,
                variant.errors
            );
        }
    }
}

/// A collector that accepts and discards everything, until the process ends.
async fn collect() -> Result<String> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}", listener.local_addr()?);
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let service = service_fn(async |request: Request<Incoming>| {
                // The body is read to its end, so that the connection can be reused.
                let _ = request.into_body().collect().await;
                Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
            });
            let serving = hyper::server::conn::http1::Builder::new();
            tokio::spawn(serving.serve_connection(TokioIo::new(stream), service));
        }
    });
    Ok(url)
}
