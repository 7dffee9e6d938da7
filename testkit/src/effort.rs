//! Effort of the tests that try many things at random, or for a while.

/// `all` with the variable `EFFORT=full`, as `make nightly` sets it; a quarter otherwise.
pub fn part_of(all: u64) -> u64 {
    let is_full = std::env::var("EFFORT").is_ok_and(|effort| effort == "full");
    if is_full { all } else { all.div_ceil(4) }
}
