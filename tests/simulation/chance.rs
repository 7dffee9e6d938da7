//! The seeded source of every random choice of a simulation.

use std::ops::Range;
use std::time::Duration;

use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Random choices that depend on the seed alone.
pub struct Chance(Mutex<StdRng>);

impl Chance {
    /// The choices of one part of a simulation.
    pub fn new(seed: u64, part: u64) -> Self {
        Self(Mutex::new(StdRng::seed_from_u64(
            seed.wrapping_mul(1_000).wrapping_add(part),
        )))
    }

    /// True once in `times`, on average.
    pub fn one_in(&self, times: u32) -> bool {
        self.0.lock().random_ratio(1, times)
    }

    /// A number of a range.
    pub fn below(&self, end: usize) -> usize {
        self.0.lock().random_range(0..end)
    }

    /// A number of a range.
    pub fn within(&self, range: Range<i64>) -> i64 {
        self.0.lock().random_range(range)
    }

    /// A time of a range of milliseconds.
    pub fn millis(&self, range: Range<u64>) -> Duration {
        Duration::from_millis(self.0.lock().random_range(range))
    }
}
