//! Charts as SVG: paths and rectangles only; text next to them is HTML. Each scales to its peak, linearly or logarithmically.
//!
//! Time runs to the right, and the current time is at the right edge; a sample is one unit wide. Heights are parts of
//! [`HEIGHT`].

use std::{fmt::Write as _, sync::Arc};

use maud::{Markup, html};

use crate::status::samples::{ReadSample, SAMPLES};

/// Width of a chart in its own units: all samples and the current one.
pub(super) const WIDTH: usize = SAMPLES + 1;
/// Height of a chart in its own units.
pub(super) const HEIGHT: f64 = 100.0;

/// Layer of a chart: a path through its values.
#[derive(Debug)]
pub(super) struct Layer<'a> {
    /// Class of the path.
    pub(super) class: &'a str,
    /// Values per sample, the newest last.
    pub(super) values: Vec<f64>,
}

impl<'a> Layer<'a> {
    pub(super) fn new(
        class: &'a str,
        samples: &[Arc<ReadSample>],
        value: impl FnMut(&Arc<ReadSample>) -> f64,
    ) -> Layer<'a> {
        let values = samples.iter().map(value).collect();
        Layer { class, values }
    }
}

/// Chart, with the values at its upper and its lower edge.
#[derive(Debug, PartialEq)]
pub(super) struct Chart {
    pub(super) svg: String,
    pub(super) top: f64,
    /// 0 in a linear chart.
    pub(super) bottom: f64,
}

/// Scale of a chart.
#[derive(Clone, Copy, Debug)]
enum Scale {
    /// From 0 to this value.
    Linear(f64),
    /// From a power of ten to a higher value. Lower values are at the lower edge.
    Logarithmic { bottom: f64, top: f64 },
}

impl Scale {
    /// Scale for values of different magnitudes, up to `top`: from the power of ten below the lowest of them that is above 0.
    fn logarithmic(lowest: f64, top: f64) -> Scale {
        if lowest <= 0.0 || top < lowest {
            return Scale::Linear(top);
        }
        // The lowest value is above the edge, too, and so visible.
        let bottom = 10f64.powf((lowest * 0.99).log10().floor());
        Scale::Logarithmic { bottom, top }
    }

    /// Height of the value's point, from the upper edge.
    fn y(self, value: f64) -> f64 {
        let ratio = match self {
            Scale::Linear(top) if top > 0.0 => value / top,
            Scale::Linear(_) => value,
            Scale::Logarithmic { bottom, .. } if value <= bottom => 0.0,
            Scale::Logarithmic { bottom, top } => (value / bottom).ln() / (top / bottom).ln(),
        };
        HEIGHT - ratio * HEIGHT
    }

    fn edges(self) -> (f64, f64) {
        match self {
            Scale::Linear(top) => (0.0, top),
            Scale::Logarithmic { bottom, top } => (bottom, top),
        }
    }

    /// Powers of ten between the edges.
    fn decades(self) -> impl Iterator<Item = f64> {
        let (bottom, top) = match self {
            Scale::Linear(_) => (1.0, 0.0),
            Scale::Logarithmic { bottom, top } => (bottom, top),
        };
        std::iter::successors(Some(bottom * 10.0), |decade| Some(decade * 10.0))
            .take_while(move |decade| *decade < top)
    }
}

/// Stacks layers, the first at the bottom; all have the same number of values. `label` describes the chart for screen
/// readers.
pub(super) fn stacked(layers: &[Layer<'_>], label: &str) -> Chart {
    let columns = layers.first().map_or(0, |layer| layer.values.len());
    let mut base = vec![0.0; columns];
    let mut edges = vec![base.clone()];
    for layer in layers {
        base.iter_mut()
            .zip(&layer.values)
            .for_each(|(sum, value)| *sum += value);
        edges.push(base.clone());
    }
    let areas = layers.iter().zip(edges.windows(2));
    let areas = areas.filter_map(|(layer, edges)| match edges {
        [below, above] => Some((layer, below.as_slice(), above.as_slice())),
        _ => None,
    });
    chart(areas, Scale::Linear(peak(&base)), label)
}

/// Lays layers over one another on a logarithmic scale, the first behind the others; each begins at the lower edge.
pub(super) fn overlaid(layers: &[Layer<'_>], label: &str) -> Chart {
    let values = || layers.iter().flat_map(|layer| &layer.values).copied();
    let top = layers.iter().map(|layer| peak(&layer.values)).fold(0.0, f64::max);
    let lowest = values().filter(|value| *value > 0.0).fold(top, f64::min);
    let columns = layers.first().map_or(0, |layer| layer.values.len());
    let zero = vec![0.0; columns];
    let areas = layers
        .iter()
        .map(|layer| (layer, zero.as_slice(), layer.values.as_slice()));
    chart(areas, Scale::logarithmic(lowest, top), label)
}

/// Chart of areas between two edges; those of layers without a value are left out.
fn chart<'a>(
    areas: impl Iterator<Item = (&'a Layer<'a>, &'a [f64], &'a [f64])>,
    scale: Scale,
    label: &str,
) -> Chart {
    let areas = areas.filter(|(layer, ..)| layer.values.iter().any(|value| *value > 0.0));
    let svg = html! {
        svg.chart viewBox=(format!("0 0 {WIDTH} {HEIGHT}")) preserveAspectRatio="none" role="img"
            aria-label={ (label) ", over the last 15 minutes" } {
            @for (layer, below, above) in areas { path class=(layer.class) d=(area(below, above, scale)) {} }
            @for decade in scale.decades() { path.decade d=(format!("M0 {:.1}H{WIDTH}", scale.y(decade))) {} }
        }
    };
    let (bottom, top) = scale.edges();
    Chart {
        svg: svg.into_string(),
        top,
        bottom,
    }
}

/// Path of the area between two stepped lines.
fn area(below: &[f64], above: &[f64], scale: Scale) -> String {
    let left = WIDTH.saturating_sub(above.len());
    let y = |value: f64| scale.y(value);
    let mut path = String::new();
    for (index, value) in above.iter().enumerate() {
        let command = if index == 0 { 'M' } else { 'L' };
        let _ = write!(
            path,
            "{command}{} {:.1}H{}",
            left + index,
            y(*value),
            left + index + 1
        );
    }
    for (index, value) in below.iter().enumerate().rev() {
        let _ = write!(path, "V{:.1}H{}", y(*value), left + index);
    }
    path.push('Z');
    path
}

/// Strip of stretches with their numbers of samples, the newest last.
pub(super) fn strip(stretches: &[(&str, usize)], label: &str) -> Markup {
    let samples: usize = stretches.iter().map(|(_, samples)| samples).sum();
    let mut end = WIDTH.saturating_sub(samples);
    let rects = stretches.iter().map(|(class, samples)| {
        end += samples;
        (class, end - samples, samples)
    });
    html! {
        svg.strip viewBox=(format!("0 0 {WIDTH} 10")) preserveAspectRatio="none" role="img" aria-label=(label) {
            @for (class, x, width) in rects { rect class=(class) x=(x) width=(width) height="10" {} }
        }
    }
}

/// Bar that is filled to `ratio`; the smallest use is visible.
pub(super) fn bar(ratio: f64, class: &str) -> Markup {
    let filled = if ratio > 0.0 { ratio.clamp(0.005, 1.0) } else { 0.0 };
    parts(&[(class, filled)])
}

/// Bar of parts, each a share of the whole bar; a list next to it has the same values.
pub(super) fn parts(parts: &[(&str, f64)]) -> Markup {
    let mut end = 0.0;
    let rects = parts.iter().map(|(class, share)| {
        let (x, width) = (end, share * 100.0);
        end += width;
        (class, format!("{x:.2}"), format!("{width:.2}"))
    });
    html! {
        svg.bar viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true" {
            @for (class, x, width) in rects { rect class=(class) x=(x) width=(width) height="10" {} }
        }
    }
}

/// The highest value; 0 if there is none above it.
fn peak(values: &[f64]) -> f64 {
    values
        .iter()
        .copied()
        .filter(|value| value.is_finite())
        .fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_stacked_with_the_newest_value_at_the_right() {
        let chart = stacked(
            &[
                Layer {
                    class: "a",
                    values: vec![1.0, 2.0],
                },
                Layer {
                    class: "b",
                    values: vec![1.0, 0.0],
                },
                Layer {
                    class: "none",
                    values: vec![0.0, 0.0],
                },
            ],
            "x",
        );
        assert_eq!(chart.top, 2.0);
        assert!(
            chart
                .svg
                .contains(r#"class="a" d="M179 50.0H180L180 0.0H181V100.0H180V100.0H179Z""#),
            "{}",
            chart.svg
        );
        assert!(
            chart
                .svg
                .contains(r#"class="b" d="M179 0.0H180L180 0.0H181V0.0H180V50.0H179Z""#),
            "{}",
            chart.svg
        );
        assert!(!chart.svg.contains("none\" d"));
    }

    #[test]
    fn overlaid_layers_show_small_values_beside_large_ones() {
        let chart = overlaid(
            &[
                Layer {
                    class: "behind",
                    values: vec![0.1, 0.0],
                },
                Layer {
                    class: "front",
                    values: vec![0.000_1, 0.0],
                },
            ],
            "x",
        );
        assert_eq!(chart.top, 0.1);
        assert!((chart.bottom - 0.000_01).abs() < 1e-9, "{}", chart.bottom);
        // A thousandth of the peak is at a quarter of the height.
        for path in [
            r#"class="behind" d="M179 0.0H180L180 100.0H181V100.0H180V100.0H179Z""#,
            r#"class="front" d="M179 75.0H180L180 100.0H181V100.0H180V100.0H179Z""#,
            r#"class="decade" d="M0 50.0H181""#,
        ] {
            assert!(chart.svg.contains(path), "{}", chart.svg);
        }
        assert!(chart.svg.find("behind") < chart.svg.find("front"));
    }

    #[test]
    fn logarithmic_chart_of_nothing_is_empty() {
        let layer = Layer {
            class: "a",
            values: vec![0.0, 0.0],
        };
        let chart = overlaid(&[layer], "x");
        assert_eq!((chart.bottom, chart.top), (0.0, 0.0));
        assert!(!chart.svg.contains("<path"), "{}", chart.svg);
    }

    #[test]
    fn upper_edge_is_the_peak() {
        for (values, top) in [
            (&[][..], 0.0),
            (&[0.0], 0.0),
            (&[0.2, 0.1], 0.2),
            (&[3.0, 51.0], 51.0),
            (&[f64::NAN], 0.0),
        ] {
            assert_eq!(peak(values), top, "{values:?}");
        }
    }

    #[test]
    fn strip_ends_at_the_right_edge() {
        let strip = strip(&[("in", 3), ("loading", 2)], "x").into_string();
        assert!(
            strip.contains(r#"class="in" x="176" width="3""#) && strip.contains(r#"x="179" width="2""#),
            "{strip}"
        );
    }
}
