//! The rate of loads, set by etcd's latency: a controller without clock and I/O.
//!
//! etcd serves other clients while a mirror is loaded, and sidecars that load at the same time do not know of each other.
//! All that they share is the latency of etcd, which each measures by small reads. The controller compares the latency of
//! the last few reads with the lowest that it was: as long as it is near, the rate grows; when it is not, the rate falls by
//! the share that is too much (delay-based congestion control, as in TCP Vegas and LEDBAT).
//!
//! A single read says little: on an idle machine, where processors have to be woken, reads differ by a factor of five and
//! more. Several are therefore taken together, and the lowest of their common figure is the baseline, not the lowest read:
//! no load would meet that one. A figure that is a little too high is chance, unless the next one is as well.
//!
//! Rates are in *cost* bytes per second: the bytes of the wire, and [`KEY_COST_BYTES`] for each key.

use std::time::Duration;

/// CPU that etcd takes for a key in addition to its bytes, in the bytes that it sends with the same CPU.
pub(super) const KEY_COST_BYTES: u64 = 1000;
/// Highest rate. Unlimited, a load would take one core of etcd and one of rangecache.
const CEILING: f64 = 600e6;
/// Lowest rate of each load during the first [`FLOOR_DOUBLES`].
const FLOOR: f64 = 4e6;
/// The lowest rate doubles each time this has passed: etcd compacts the revision of a load sooner or later, and a load
/// that then begins again costs more than one that ends.
const FLOOR_DOUBLES: Duration = Duration::from_secs(60);
/// Factor by which the rate grows from the lowest until a latency is too high: a fleet that begins to load at once exceeds
/// what etcd bears by no more. The first figure is taken at the lowest rate: it is the baseline, for a fleet as well.
const FIRST_GROWTH: f64 = 2.0;
/// Factor by which the rate grows later while the latency is not too high.
const GROWTH: f64 = 1.1;
/// Smallest growth, by which the slowest of many loads catches up.
const MIN_GROWTH: f64 = 2e6;
/// Largest cut at once.
const LARGEST_CUT: f64 = 0.5;
/// A latency above this multiple of the lowest, plus [`TOLERATED`], is too high.
const TOLERATED_FACTOR: f64 = 2.5;
/// Waiting for a processor, which is no sign of a queue: processors that sleep are woken late.
const TOLERATED: Duration = Duration::from_micros(700);
/// Above this multiple of what is tolerated a single figure shows a queue.
const CERTAIN_FACTOR: f64 = 2.0;
/// Reads that are taken together.
const READS: usize = 5;
/// The latency of these reads is that of the one at this place when they are sorted.
const TYPICAL: usize = READS / 2;
/// A latency counts as the lowest for one to two of these: an etcd that has become slower for another reason is
/// measured by what it is now.
const BASELINE_AGE: Duration = Duration::from_secs(60);
/// Interval between reads at a high rate.
const SHORTEST_INTERVAL: Duration = Duration::from_millis(20);
/// Interval between reads at a low rate: they must not cost etcd more than the load.
const LONGEST_INTERVAL: Duration = Duration::from_millis(100);
/// Cost bytes per read.
const BYTES_PER_INTERVAL: f64 = 640e3;
/// Cost bytes of each load that are read at once: small mirrors are loaded before a latency says anything.
const FREE: u64 = 4_000_000;
/// Time by which reading may be ahead of the rate: timers are no finer.
const AHEAD: Duration = Duration::from_millis(1);
/// Time without reading that may be made up for. More would be a burst.
const MADE_UP: Duration = Duration::from_millis(2);

/// Rate of all loads of this process. Times are those since an origin of the caller's choice.
#[derive(Debug)]
pub(super) struct LoadPace {
    rate: f64,
    /// No latency was too high yet.
    is_starting: bool,
    /// Loads in progress.
    loads: u32,
    /// Start of the first of them.
    began: Duration,
    baseline: Baseline,
    /// Latencies since the last figure.
    reads: Vec<Duration>,
    /// Whether the last figure was too high.
    was_high: bool,
    /// Cost bytes that may be read at once.
    free: u64,
    /// When the cost of what was read is paid for.
    paid: Duration,
}

/// The lowest latency of the last seconds.
#[derive(Debug)]
struct Baseline {
    /// Of the current period, and of the one before.
    lowest: [Option<Duration>; 2],
    period_began: Duration,
}

impl LoadPace {
    /// The pace of loads of which the first begins at `now`.
    pub(super) fn new(now: Duration) -> LoadPace {
        LoadPace {
            rate: FLOOR,
            is_starting: true,
            loads: 0,
            began: now,
            baseline: Baseline {
                lowest: [None; 2],
                period_began: now,
            },
            reads: Vec::with_capacity(READS),
            was_high: false,
            free: 0,
            paid: now,
        }
    }

    /// Counts a load that begins.
    pub(super) fn begin(&mut self) {
        self.loads += 1;
        self.free += FREE;
    }

    /// Counts a load that ends; returns whether it was the last.
    pub(super) fn end(&mut self) -> bool {
        self.loads = self.loads.saturating_sub(1);
        self.loads == 0
    }

    /// Cost bytes per second that all loads together may read.
    pub(super) fn rate(&self) -> f64 {
        self.rate
    }

    /// Time until the next read.
    pub(super) fn interval(&self) -> Duration {
        if self.is_starting {
            return SHORTEST_INTERVAL;
        }
        Duration::from_secs_f64(BYTES_PER_INTERVAL / self.rate).clamp(SHORTEST_INTERVAL, LONGEST_INTERVAL)
    }

    /// Takes the latency of a read that ended at `now`.
    pub(super) fn record_latency(&mut self, now: Duration, latency: Duration) {
        self.reads.push(latency);
        if self.reads.len() < READS {
            return;
        }
        self.reads.sort_unstable();
        let latency = self.reads[TYPICAL];
        self.reads.clear();
        let tolerated = self.baseline.record(now, latency).mul_f64(TOLERATED_FACTOR) + TOLERATED;
        let was_high = self.was_high;
        self.was_high = latency > tolerated;
        if self.was_high {
            if was_high || latency > tolerated.mul_f64(CERTAIN_FACTOR) {
                self.cut(now, tolerated.as_secs_f64() / latency.as_secs_f64());
            }
        } else if self.is_starting {
            self.set_rate(now, self.rate * FIRST_GROWTH);
        } else {
            self.set_rate(now, (self.rate * GROWTH).max(self.rate + MIN_GROWTH));
        }
    }

    /// Takes a read that failed at `now`: an etcd that does not answer is not loaded faster.
    pub(super) fn record_failure(&mut self, now: Duration) {
        self.cut(now, 0.0);
    }

    fn cut(&mut self, now: Duration, share: f64) {
        self.is_starting = false;
        self.reads.clear();
        self.set_rate(now, self.rate * share.max(LARGEST_CUT));
    }

    fn set_rate(&mut self, now: Duration, rate: f64) {
        self.rate = rate.min(CEILING).max(self.floor(now));
    }

    /// Lowest rate: every load ends.
    fn floor(&self, now: Duration) -> f64 {
        let age = now.saturating_sub(self.began);
        let doublings = age.as_secs() / FLOOR_DOUBLES.as_secs();
        let doublings = i32::try_from(doublings).unwrap_or(i32::MAX);
        (FLOOR * f64::from(self.loads) * 2_f64.powi(doublings)).min(CEILING)
    }

    /// Whether loads have read what they may read at once.
    pub(super) fn is_paced(&self) -> bool {
        self.free == 0
    }

    /// Charges `cost` bytes read at `now`.
    pub(super) fn charge(&mut self, now: Duration, cost: u64) {
        let free = cost.min(self.free);
        self.free -= free;
        let cost = cost - free;
        #[allow(clippy::cast_precision_loss, reason = "fewer than 2^53 bytes")]
        let due = Duration::from_secs_f64(cost as f64 / self.rate);
        self.paid = self.paid.max(now.saturating_sub(MADE_UP)) + due;
    }

    /// Time at which reading continues; `None` if that is now.
    pub(super) fn wait(&self, now: Duration) -> Option<Duration> {
        (self.paid > now + AHEAD).then_some(self.paid)
    }
}

impl Baseline {
    /// Takes a latency, and returns the lowest.
    fn record(&mut self, now: Duration, latency: Duration) -> Duration {
        if now.saturating_sub(self.period_began) >= BASELINE_AGE {
            self.period_began = now;
            self.lowest = [None, self.lowest[0]];
        }
        let lowest = self.lowest.into_iter().flatten().min();
        let lowest = lowest.map_or(latency, |lowest| lowest.min(latency));
        self.lowest[0] = Some(self.lowest[0].map_or(latency, |own| own.min(latency)));
        lowest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: Duration = Duration::from_micros(300);
    const STEP: Duration = Duration::from_millis(1);

    /// Bytes that a load lets etcd send ahead in a step: four receive windows, as a step has several round trips.
    const WINDOW: f64 = 1e6;

    /// A load that measures the server itself.
    struct Loader {
        pace: LoadPace,
        /// Asked for and not served yet.
        queued: f64,
        rest: f64,
        next_read: Duration,
        ended: Option<Duration>,
    }

    impl Loader {
        fn new(number: u32, bytes: f64) -> Loader {
            let mut pace = LoadPace::new(Duration::ZERO);
            pace.begin();
            Loader {
                pace,
                queued: 0.0,
                rest: bytes,
                // Loads measure at different times, as by jitter.
                next_read: STEP * (1 + number),
                ended: None,
            }
        }

        fn step(&mut self, now: Duration, latency: Duration) {
            if self.ended.is_some() {
                return;
            }
            if now >= self.next_read {
                self.pace.record_latency(now, latency);
                self.next_read = now + self.pace.interval();
            }
            let asked = self.pace.rate() * STEP.as_secs_f64();
            let asked = asked.min(self.rest).min(WINDOW - self.queued);
            self.queued += asked;
            self.rest -= asked;
            if self.rest <= 0.0 && self.queued < 1.0 {
                self.ended = Some(now);
            }
        }
    }

    /// An etcd that serves `capacity` cost bytes a second, and whose small reads wait for what is in front of them:
    /// latencies of each step, sorted, and the times at which the loads end.
    fn simulate(capacity: f64, loaders: &mut [Loader]) -> (Vec<Duration>, Vec<Duration>) {
        let (mut now, mut latencies) = (Duration::ZERO, Vec::new());
        while loaders.iter().any(|loader| loader.ended.is_none()) {
            now += STEP;
            assert!(now < Duration::from_secs(3600), "a load does not end");
            let queue: f64 = loaders.iter().map(|loader| loader.queued).sum();
            let served = (capacity * STEP.as_secs_f64() / queue.max(1.0)).min(1.0);
            let latency = BASE + Duration::from_secs_f64(queue * (1.0 - served) / capacity);
            latencies.push(latency);
            for loader in &mut *loaders {
                loader.queued *= 1.0 - served;
                loader.step(now, latency);
            }
        }
        latencies.sort();
        (
            latencies,
            loaders.iter().filter_map(|loader| loader.ended).collect(),
        )
    }

    #[test]
    fn load_of_an_idle_etcd_reaches_the_ceiling() {
        let mut loaders = [Loader::new(0, 1.5e9)];
        let (_, ended) = simulate(2e9, &mut loaders);
        assert!((loaders[0].pace.rate() - CEILING).abs() < 1.0);
        assert!(ended[0] < Duration::from_millis(3200), "{ended:?}");
    }

    #[test]
    fn sixteen_loads_share_a_server_and_leave_room() {
        let mut loaders: Vec<_> = (0..16).map(|number| Loader::new(number, 500e6)).collect();
        let (latencies, ended) = simulate(500e6, &mut loaders);
        let percentile = |share: usize| latencies[latencies.len() * share / 100];
        let tolerated = BASE.mul_f64(TOLERATED_FACTOR) + TOLERATED;
        assert!(
            percentile(75) <= tolerated,
            "others wait for {:?}",
            percentile(75)
        );
        // 8 GB at 500 MB/s take 16 s.
        let last = *ended.iter().max().unwrap();
        assert!(last < Duration::from_secs(24), "{last:?}");
        let first = *ended.iter().min().unwrap();
        assert!(
            first * 3 > last,
            "one of the loads took the others' share: {ended:?}"
        );
    }

    /// Latencies as of an idle machine whose processors sleep: a median of five times the lowest, a p99 of thirty times.
    #[test]
    #[allow(clippy::cast_precision_loss, reason = "chance")]
    fn chance_does_not_keep_loads_slow() {
        const LOADS: u64 = 50;
        let mut sum = Duration::ZERO;
        for mut state in 1..=LOADS {
            let mut chance = || {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                (state >> 11) as f64 / (1_u64 << 53) as f64
            };
            let (mut loader, mut now) = (Loader::new(0, 1.5e9), Duration::ZERO);
            while loader.ended.is_none() {
                now += STEP;
                loader.queued = 0.0;
                loader.step(now, BASE + BASE.mul_f64(-6.0 * (1.0 - chance()).ln()));
            }
            sum += now;
        }
        let mean = sum / u32::try_from(LOADS).unwrap();
        assert!(
            mean < Duration::from_secs(8),
            "{mean:?} on average although etcd is idle"
        );
    }

    #[test]
    fn load_makes_room_when_latency_rises_and_takes_it_back() {
        let mut pace = LoadPace::new(Duration::ZERO);
        pace.begin();
        let mut now = Duration::ZERO;
        let mut record = |pace: &mut LoadPace, latency, figures: usize| {
            for _ in 0..figures * READS {
                now += pace.interval();
                pace.record_latency(now, latency);
            }
        };
        record(&mut pace, BASE, 20);
        assert!((pace.rate() - CEILING).abs() < 1.0);
        record(&mut pace, BASE * 20, 5);
        assert!(pace.rate() < CEILING / 16.0, "{}", pace.rate());
        record(&mut pace, BASE, 200);
        assert!((pace.rate() - CEILING).abs() < 1.0);
    }

    #[test]
    fn load_ends_whatever_the_latency_is() {
        let mut pace = LoadPace::new(Duration::ZERO);
        pace.begin();
        let (mut now, mut read) = (STEP, 0.0);
        // Within five minutes, after which Kubernetes has etcd compacted, 7 GB are read.
        while now < Duration::from_secs(300) {
            pace.record_failure(now);
            let interval = pace.interval();
            read += pace.rate() * interval.as_secs_f64();
            now += interval;
        }
        assert!(read > 7e9, "only {read} bytes in five minutes");
        assert!(pace.rate() >= 16.0 * FLOOR);
    }

    #[test]
    fn load_is_slow_while_etcd_does_not_answer() {
        let mut pace = LoadPace::new(Duration::ZERO);
        pace.begin();
        for number in 1..100 {
            pace.record_failure(STEP * number);
        }
        assert!((pace.rate() - FLOOR).abs() < 1.0, "{}", pace.rate());
    }

    #[test]
    fn each_of_several_loads_has_the_lowest_rate() {
        let mut pace = LoadPace::new(Duration::ZERO);
        (0..4).for_each(|_| pace.begin());
        for number in 1..100 {
            pace.record_failure(STEP * number);
        }
        assert!((pace.rate() - 4.0 * FLOOR).abs() < 1.0, "{}", pace.rate());
        assert!(!pace.end());
    }

    #[test]
    fn latency_that_has_become_normal_does_not_slow_a_load() {
        let mut pace = LoadPace::new(Duration::ZERO);
        pace.begin();
        let mut now = STEP;
        while pace.reads.len() + 1 < READS || now == STEP {
            now += STEP;
            pace.record_latency(now, BASE);
        }
        pace.record_latency(now, BASE);
        // etcd is slower since then, for another reason than this load.
        while now < BASELINE_AGE * 4 {
            now += pace.interval();
            pace.record_latency(now, BASE * 20);
        }
        assert!((pace.rate() - CEILING).abs() < 1.0, "{}", pace.rate());
    }

    #[test]
    fn reading_waits_for_the_rate_and_makes_up_for_little() {
        let second = Duration::from_secs(1);
        let mut pace = LoadPace::new(second);
        pace.begin();
        assert_eq!(pace.wait(second), None);
        assert!(!pace.is_paced());
        pace.charge(second, FREE);
        assert!(pace.is_paced());
        assert_eq!(pace.wait(second), None);
        // A second's worth.
        pace.charge(second, 4_000_000);
        let due = pace.wait(second).unwrap();
        assert_eq!(due, second * 2);
        assert_eq!(pace.wait(due), None);
        // After a pause the rate is that of any other time.
        pace.charge(second * 60, 4_000_000);
        assert_eq!(pace.wait(second * 60), Some(second * 61 - MADE_UP));
    }
}
