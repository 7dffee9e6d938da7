//! Which calls are traced, as `OTEL_TRACES_SAMPLER` has it.

use http::{HeaderMap, HeaderValue};

use super::context::{Parent, TRACEPARENT, TraceId, random, says_unsampled};

/// Which traces are recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sampler {
    /// Whether a caller's own decision is taken over where it has made one.
    pub is_parent_based: bool,
    /// For all other calls.
    pub root: Ratio,
}

/// A share of all traces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ratio {
    /// None.
    None,
    /// Those whose id's low 63 bits are below this.
    Below(u64),
    /// All.
    All,
}

/// How a call to be traced begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sampled {
    /// The caller's trace, or a new one.
    pub trace_id: TraceId,
    /// The caller's span.
    pub parent: Option<Parent>,
}

impl Ratio {
    /// A share from 0 to 1.
    #[must_use]
    pub fn of(share: f64) -> Ratio {
        if share >= 1.0 {
            return Ratio::All;
        }
        #[allow(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "from 0 to 2^63"
        )]
        let below = (share * (1_u64 << 63) as f64) as u64;
        if below == 0 {
            Ratio::None
        } else {
            Ratio::Below(below)
        }
    }

    fn takes(self, low: u64) -> bool {
        match self {
            Ratio::None => false,
            Ratio::Below(below) => low >> 1 < below,
            Ratio::All => true,
        }
    }
}

impl Sampler {
    /// Whether the call with these headers is traced, and as whose. A call that is not costs a look at one header.
    #[must_use]
    pub fn sample(&self, headers: &HeaderMap) -> Option<Sampled> {
        let header = headers.get(&TRACEPARENT).map(HeaderValue::as_bytes);
        // The rest of it, were it wrong, would not make anybody want this call's trace.
        if self.is_parent_based && header.is_some_and(says_unsampled) {
            return None;
        }
        if let Some(parent) = header.and_then(Parent::of) {
            let taken = if self.is_parent_based {
                parent.is_sampled
            } else {
                self.root.takes(parent.context.trace_id.low())
            };
            return taken.then_some(Sampled {
                trace_id: parent.context.trace_id,
                parent: Some(parent),
            });
        }
        self.sample_root().map(|trace_id| Sampled {
            trace_id,
            parent: None,
        })
    }

    /// The id of a new trace, if it is taken.
    #[must_use]
    pub fn sample_root(&self) -> Option<TraceId> {
        if self.root == Ratio::None {
            return None;
        }
        let low = random();
        self.root.takes(low).then(|| TraceId::with_low(low))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampled(sampler: Sampler, flags: Option<&str>) -> bool {
        let mut headers = HeaderMap::new();
        if let Some(flags) = flags {
            let text = format!("00-4bf92f3577b34da67fffffffffffffff-00f067aa0ba902b7-{flags}");
            headers.insert(TRACEPARENT, HeaderValue::from_str(&text).unwrap());
        }
        sampler.sample(&headers).is_some()
    }

    #[test]
    fn a_callers_decision_counts_where_it_is_asked() {
        for root in [Ratio::None, Ratio::of(0.1), Ratio::All] {
            let parent_based = Sampler {
                is_parent_based: true,
                root,
            };
            assert!(sampled(parent_based, Some("01")));
            assert!(!sampled(parent_based, Some("00")));
        }
        for (root, taken) in [
            (Ratio::None, false),
            (Ratio::All, true),
            // The id's low half is just below a half of all.
            (Ratio::of(0.49), false),
            (Ratio::of(0.51), true),
        ] {
            let own = Sampler {
                is_parent_based: false,
                root,
            };
            assert_eq!(sampled(own, Some("00")), taken, "{root:?}");
            assert_eq!(sampled(own, Some("01")), taken, "{root:?}");
        }
    }

    #[test]
    fn a_share_of_new_traces_is_taken() {
        let share = |share| {
            let sampler = Sampler {
                is_parent_based: true,
                root: Ratio::of(share),
            };
            (0..10_000).filter(|_| sampled(sampler, None)).count()
        };
        assert_eq!((share(0.0), share(1.0)), (0, 10_000));
        let tenth = share(0.1);
        assert!((700..1300).contains(&tenth), "{tenth}");
    }
}
