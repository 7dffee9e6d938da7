//! The report as text, for a terminal.

use crate::measure::{Block, FROM_MEMORY};
use crate::report::{Report, Row, Stat};
use crate::targets::Kind;

/// Facts printed above the table.
pub(crate) struct Heading {
    /// The machine.
    pub(crate) machine: String,
    /// Versions of the programs.
    pub(crate) versions: String,
    /// Number of rounds.
    pub(crate) rounds: usize,
    /// Watchers open beside the second measurement of a load; 0 if there was none.
    pub(crate) watchers_beside: usize,
    /// Load average before the first case; above about 0.5 the machine was busy.
    pub(crate) load_before: f64,
}

/// The whole report as text.
pub(crate) fn write(heading: &Heading, report: &Report) -> String {
    let mut text = format!(
        "{}\n{}\n{} rounds, targets in turn; medians of the rounds' medians; load average before: {:.2}\n\n",
        heading.machine, heading.versions, heading.rounds, heading.load_before
    );
    text += &grid(&figures(&report.rows));
    text += "\n× is how many times as good as etcd itself, or as grpc-proxy, rangecache is: above 1 it is better.\n\
             ! marks figures beside which calls failed or brought a wrong number of bytes.\n\n";
    if report.rows.iter().any(|row| !row.beside.is_empty()) {
        text += &grid(&beside(heading.watchers_beside, &report.rows));
        text.push('\n');
    }
    text += &grid(&details(&report.rows));
    text += "\nCPU is per call and of each process; client, proxy and etcd share the machine's cores. From memory is the least share\n\
             of any round that rangecache says it answered without asking etcd for the data.\n";
    for note in &report.notes {
        text += &format!("\nNote: {note}\n");
    }
    text
}

fn cell(row: &Row, kind: Kind) -> String {
    let mark = if row.failed.contains(&kind) { "!" } else { "" };
    row.median(kind)
        .map_or_else(|| format!("–{mark}"), |value| row.unit.write(value) + mark)
}

fn times(row: &Row, base: Kind) -> String {
    match row.times(base) {
        None => "–".into(),
        // With a base near zero a factor has no meaning.
        Some(times) if times > 999.0 => "> 999×".into(),
        Some(times) => format!("{times:.2}×"),
    }
}

fn figures(rows: &[Row]) -> Vec<Vec<String>> {
    let heads = [
        "",
        "what",
        "etcd",
        "grpc-proxy",
        "rangecache",
        "floor",
        "× etcd",
        "× proxy",
        "goal",
        "reached",
        "spread",
    ];
    let mut lines = vec![heads.map(String::from).to_vec()];
    let with_baseline = rows.iter().any(|row| row.median(Kind::Baseline).is_some());
    if with_baseline {
        lines[0].splice(6..6, ["baseline".to_owned(), "× baseline".to_owned()]);
    }
    for row in rows {
        let reached = match row.reached() {
            Some(true) => "yes",
            Some(false) => "NO",
            None if row.checks.is_empty() => "",
            None => "?",
        };
        lines.push(vec![
            row.goal.into(),
            row.what.clone(),
            cell(row, Kind::Direct),
            cell(row, Kind::GrpcProxy),
            cell(row, Kind::Rangecache),
            cell(row, Kind::Floor),
            times(row, Kind::Direct),
            times(row, Kind::GrpcProxy),
            row.goal_text(),
            reached.into(),
            spread(row),
        ]);
        if let Some(line) = lines.last_mut().filter(|_| with_baseline) {
            line.splice(6..6, [cell(row, Kind::Baseline), times(row, Kind::Baseline)]);
        }
    }
    lines
}

/// Minimum and maximum of rangecache over the rounds; etcd's if there is no rangecache.
fn spread(row: &Row) -> String {
    let stat = row
        .figures
        .get(&Kind::Rangecache)
        .or_else(|| row.figures.get(&Kind::Direct));
    stat.map_or_else(String::new, |Stat { min, max, .. }| {
        format!("{} – {}", row.unit.write(*min), row.unit.write(*max))
    })
}

/// Smallest share of a round's Range calls that rangecache answered from memory.
fn from_memory(blocks: &[Block]) -> String {
    let shares = blocks
        .iter()
        .filter_map(|block| block.extra.get(FROM_MEMORY).copied());
    // A round without Range calls has no share.
    let shares = Stat::of(shares.filter(|share| share.is_finite()));
    shares.map_or_else(|| "–".into(), |stat| format!("{:.1} %", stat.min * 100.0))
}

/// Figures with watchers open beside the load, and their ratios to those without.
fn beside(watchers: usize, rows: &[Row]) -> Vec<Vec<String>> {
    let kinds = [Kind::Direct, Kind::GrpcProxy, Kind::Rangecache];
    let mut heads = vec![String::new(), format!("beside {watchers} watchers")];
    for kind in kinds {
        heads.extend([kind.name().to_owned(), "ratio".to_owned()]);
    }
    heads.push(String::new());
    let mut lines = vec![heads];
    for row in rows.iter().filter(|row| !row.beside.is_empty()) {
        let mut line = vec![row.goal.to_owned(), row.what.clone()];
        for kind in kinds {
            match row.beside(kind) {
                Some((figure, ratio)) => line.extend([row.unit.write(figure), format!("{ratio:.2}")]),
                None => line.extend(["–".to_owned(), "–".to_owned()]),
            }
        }
        line.push(String::new());
        lines.push(line);
    }
    lines
}

fn details(rows: &[Row]) -> Vec<Vec<String>> {
    let heads = [
        "",
        "what",
        "target",
        "min",
        "median",
        "max",
        "calls",
        "errors",
        "CPU client",
        "CPU proxy",
        "CPU etcd",
        "from memory",
        "first error",
    ];
    let mut lines = vec![heads.map(String::from).to_vec()];
    for row in rows {
        let Some(series) = &row.series else { continue };
        for (kind, blocks) in series {
            let sum = |figure: fn(&Block) -> u64| blocks.iter().map(figure).sum::<u64>();
            let calls = sum(|block| block.calls);
            let cpu = |figure: fn(&Block) -> u64| {
                if calls == 0 {
                    "–".into()
                } else {
                    crate::report::Unit::Nanoseconds.write(sum(figure) as f64 / calls as f64)
                }
            };
            let stat = row.figures.get(kind);
            let part = |figure: fn(&Stat) -> f64| {
                stat.map_or_else(|| "–".into(), |stat| row.unit.write(figure(stat)))
            };
            lines.push(vec![
                row.goal.into(),
                row.what.clone(),
                kind.name().into(),
                part(|stat| stat.min),
                part(|stat| stat.median),
                part(|stat| stat.max),
                calls.to_string(),
                sum(|block| block.errors).to_string(),
                cpu(|block| block.cpu_client_ns),
                cpu(|block| block.cpu_proxy_ns),
                cpu(|block| block.cpu_etcd_ns),
                from_memory(blocks),
                blocks
                    .iter()
                    .find_map(|block| block.first_error.clone())
                    .unwrap_or_default(),
            ]);
        }
    }
    lines
}

/// Pads columns to the widest cell; the first two and the last are left-aligned, figures right-aligned.
pub(crate) fn grid(lines: &[Vec<String>]) -> String {
    let columns = lines.first().map_or(0, Vec::len);
    let width = |column: usize| {
        lines
            .iter()
            .map(|line| line[column].chars().count())
            .max()
            .unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for (number, line) in lines.iter().enumerate() {
        let mut written = String::new();
        for (column, cell) in line.iter().enumerate() {
            let padding = " ".repeat(widths[column] - cell.chars().count());
            let left = column < 2 || column + 1 == columns;
            written += &if left {
                format!("{cell}{padding}  ")
            } else {
                format!("{padding}{cell}  ")
            };
        }
        text += written.trim_end();
        text.push('\n');
        if number == 0 {
            text += &"─".repeat(
                widths
                    .iter()
                    .map(|width| width + 2)
                    .sum::<usize>()
                    .saturating_sub(2),
            );
            text.push('\n');
        }
    }
    text
}
