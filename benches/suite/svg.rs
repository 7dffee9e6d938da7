//! Two drawings of the report: ratios and growth. They follow the reader's light or dark colour scheme.

use std::fmt::Write;
use std::path::Path;

use anyhow::{Context, Result};

use crate::report::{Check, Report, Row};
use crate::targets::Kind;

const STYLE: &str = "<style>\
text{font:12px system-ui,sans-serif;fill:#24292f}\
.title{font-size:15px;font-weight:600}\
.small{font-size:11px;fill:#57606a}\
.line{stroke:#d0d7de;stroke-width:1}\
.one{stroke:#57606a;stroke-width:1.5}\
.goal{stroke:#cf222e;stroke-width:2}\
.s0{fill:#0969da;stroke:#0969da}.s1{fill:#bf8700;stroke:#bf8700}\
.s2{fill:#1a7f37;stroke:#1a7f37}.s3{fill:#8c959f;stroke:#8c959f}\
.curve{fill:none;stroke-width:2}\
@media(prefers-color-scheme:dark){\
text{fill:#e6edf3}.small{fill:#9198a1}.line{stroke:#3d444d}.one{stroke:#9198a1}.goal{stroke:#ff7b72}\
.s0{fill:#4493f8;stroke:#4493f8}.s1{fill:#d29922;stroke:#d29922}\
.s2{fill:#3fb950;stroke:#3fb950}.s3{fill:#656c76;stroke:#656c76}\
.curve{fill:none}}\
</style>";

/// Writes `benchmark-ratios.svg` and `benchmark-growth.svg` into a folder, each only if it has data.
pub(crate) fn write(folder: &Path, report: &Report) -> Result<()> {
    std::fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let drawings = [
        ("benchmark-ratios.svg", ratios(&report.rows)),
        ("benchmark-growth.svg", growth(&report.rows)),
    ];
    for (name, drawing) in drawings {
        if let Some(drawing) = drawing {
            let path = folder.join(name);
            std::fs::write(&path, drawing).with_context(|| format!("cannot write {}", path.display()))?;
        }
    }
    Ok(())
}

/// A logarithmic scale, in pixels.
struct Scale {
    from: f64,
    to: f64,
    start: f64,
    length: f64,
}

impl Scale {
    fn at(&self, value: f64) -> f64 {
        let share = (value.clamp(self.from, self.to) / self.from).log10() / (self.to / self.from).log10();
        self.start + share * self.length
    }

    /// Powers of ten on the scale.
    fn decades(&self) -> impl Iterator<Item = f64> {
        let (from, to) = (self.from, self.to);
        (-12..=12)
            .map(|power| 10_f64.powi(power))
            .filter(move |decade| (from..=to).contains(decade))
    }
}

/// Factors over etcd and over grpc-proxy: two bars per row, with a mark at the goal.
fn ratios(rows: &[Row]) -> Option<String> {
    let rows: Vec<&Row> = rows
        .iter()
        .filter(|row| row.times(Kind::Direct).is_some() && !row.checks.is_empty())
        .collect();
    if rows.is_empty() {
        return None;
    }
    let (row_height, top) = (30.0, 70.0);
    let height = top + row_height * rows.len() as f64 + 30.0;
    let scale = Scale {
        from: 0.1,
        to: 1000.0,
        start: 330.0,
        length: 480.0,
    };
    let mut svg = open(880.0, height);
    text(
        &mut svg,
        12.0,
        24.0,
        "title",
        "rangecache compared with etcd and its grpc-proxy (factor, larger is better)",
    );
    legend(
        &mut svg,
        330.0,
        44.0,
        &[("s0", "against etcd"), ("s1", "against grpc-proxy")],
    );
    text(
        &mut svg,
        590.0,
        44.0,
        "small",
        "red: the goal; logarithmic; ends at 0.1× and 1000×",
    );
    for decade in scale.decades() {
        let class = if (decade - 1.0).abs() < 1e-9 {
            "one"
        } else {
            "line"
        };
        vertical(&mut svg, class, scale.at(decade), top - 10.0, height - 24.0);
        text(
            &mut svg,
            scale.at(decade) - 10.0,
            height - 8.0,
            "small",
            &format!("{decade}×"),
        );
    }
    for (number, row) in rows.iter().enumerate() {
        let y = top + row_height * number as f64;
        text(
            &mut svg,
            12.0,
            y + 14.0,
            "",
            &format!("{} {}", row.goal, row.what),
        );
        for (series, base) in [Kind::Direct, Kind::GrpcProxy].into_iter().enumerate() {
            let Some(times) = row.times(base) else { continue };
            let (one, end) = (scale.at(1.0), scale.at(times));
            let beside = if times > 999.0 {
                "> 999×".into()
            } else {
                format!("{times:.2}×")
            };
            let (y, width) = (y + 2.0 + 11.0 * series as f64, (end - one).abs().max(1.0));
            let _ = write!(
                svg,
                r#"<rect class="s{series}" x="{:.1}" y="{y}" width="{width:.1}" height="9"/>"#,
                one.min(end)
            );
            text(&mut svg, one.max(end) + 6.0, y + 9.0, "small", &beside);
        }
        for check in &row.checks {
            let (times, y) = match *check {
                Check::TimesDirect(times) => (times, y + 1.0),
                Check::TimesProxy(times) => (times, y + 12.0),
                _ => continue,
            };
            vertical(&mut svg, "goal", scale.at(times), y, y + 11.0);
        }
    }
    svg += "</svg>\n";
    Some(svg)
}

/// Latency by number of keys: a panel per read, a curve per target.
fn growth(rows: &[Row]) -> Option<String> {
    let mut panels: Vec<(String, Vec<(f64, &Row)>)> = Vec::new();
    for row in rows.iter().filter(|row| row.goal == "P15") {
        let Some((name, rest)) = row.what.split_once(" among ") else {
            continue;
        };
        let keys = match rest.split_once(" keys")?.0 {
            text if text.ends_with('k') => text.trim_end_matches('k').parse::<f64>().ok()? * 1e3,
            text => text.trim_end_matches('M').parse::<f64>().ok()? * 1e6,
        };
        match panels.iter_mut().find(|panel| panel.0 == name) {
            Some(panel) => panel.1.push((keys, row)),
            None => panels.push((name.to_owned(), vec![(keys, row)])),
        }
    }
    if panels.is_empty() {
        return None;
    }
    let (width, height) = (290.0, 340.0);
    let mut svg = open(width * panels.len() as f64 + 20.0, height);
    text(
        &mut svg,
        12.0,
        24.0,
        "title",
        "Latency of a read by number of keys in the store (median, both axes logarithmic)",
    );
    let names: Vec<(String, &str)> = Kind::ALL
        .iter()
        .enumerate()
        .map(|(series, kind)| (format!("s{series}"), kind.name()))
        .collect();
    legend(
        &mut svg,
        12.0,
        46.0,
        &names
            .iter()
            .map(|(class, name)| (class.as_str(), *name))
            .collect::<Vec<_>>(),
    );
    for (number, (name, points)) in panels.iter().enumerate() {
        let left = 70.0 + width * number as f64;
        let x = Scale {
            from: 1e4,
            to: 1e6,
            start: left,
            length: width - 90.0,
        };
        // The scale starts at the bottom, so its length is negative.
        let y = Scale {
            from: 1e4,
            to: 1e9,
            start: height - 40.0,
            length: -(height - 125.0),
        };
        text(&mut svg, left, 74.0, "", name);
        for decade in y.decades() {
            let _ = write!(
                svg,
                r#"<line class="line" x1="{left}" x2="{:.1}" y1="{:.1}" y2="{:.1}"/>"#,
                left + width - 90.0,
                y.at(decade),
                y.at(decade)
            );
            let label = if decade < 1e6 {
                format!("{} µs", decade / 1e3)
            } else {
                format!("{} ms", decade / 1e6)
            };
            text(&mut svg, left - 52.0, y.at(decade) + 4.0, "small", &label);
        }
        for (decade, label) in [(1e4, "10k"), (1e5, "100k"), (1e6, "1M keys")] {
            text(&mut svg, x.at(decade) - 10.0, height - 20.0, "small", label);
        }
        for (series, kind) in Kind::ALL.into_iter().enumerate() {
            let at: Vec<(f64, f64)> = points
                .iter()
                .filter_map(|(keys, row)| Some((x.at(*keys), y.at(row.median(kind)?))))
                .collect();
            let path: Vec<String> = at.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
            let _ = write!(
                svg,
                r#"<polyline class="s{series} curve" points="{}"/>"#,
                path.join(" ")
            );
            for (x, y) in at {
                let _ = write!(
                    svg,
                    r#"<circle class="s{series}" cx="{x:.1}" cy="{y:.1}" r="3"/>"#
                );
            }
        }
    }
    svg += "</svg>\n";
    Some(svg)
}

fn open(width: f64, height: f64) -> String {
    format!(
        r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">{STYLE}"#
    )
}

fn text(svg: &mut String, x: f64, y: f64, class: &str, content: &str) {
    let content = content.replace('&', "&amp;").replace('<', "&lt;");
    // Writing into a String cannot fail.
    let _ = write!(
        svg,
        r#"<text class="{class}" x="{x:.1}" y="{y:.1}">{content}</text>"#
    );
}

fn vertical(svg: &mut String, class: &str, x: f64, from: f64, to: f64) {
    let _ = write!(
        svg,
        r#"<line class="{class}" x1="{x:.1}" x2="{x:.1}" y1="{from:.1}" y2="{to:.1}"/>"#
    );
}

fn legend(svg: &mut String, mut x: f64, y: f64, entries: &[(&str, &str)]) {
    for (class, name) in entries {
        let _ = write!(
            svg,
            r#"<rect class="{class}" x="{x}" y="{}" width="10" height="10"/>"#,
            y - 9.0
        );
        text(svg, x + 15.0, y, "", name);
        x += 40.0 + 7.0 * name.len() as f64;
    }
}
