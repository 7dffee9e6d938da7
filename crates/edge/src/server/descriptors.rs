//! File descriptors: the process may open as many as its hard limit allows, and clients' connections leave a share of
//! them to everything else.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Descriptors that clients' connections never take: those to etcd and to a collector, listeners, files, and the
/// connections of the admin port.
const RESERVED: u64 = 256;
/// Descriptors of one client connection: its own, and one to etcd if it is HTTP/1.
const PER_CONNECTION: u64 = 2;

/// Raises the limit on open files (`RLIMIT_NOFILE`) to the hard limit, and returns how many client connections there
/// may be: at most `wanted`.
#[must_use]
pub fn connections_within_descriptors(wanted: u32) -> u32 {
    let descriptors = raised();
    let connections = affordable(descriptors).min(wanted);
    if connections < wanted {
        tracing::info!(
            descriptors,
            connections,
            wanted,
            "the limit on open files is too low for --max-connections, which is lowered"
        );
    }
    connections
}

/// Raises the limit, and returns it.
fn raised() -> u64 {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: maximum,
        maximum,
    };
    if current == maximum || setrlimit(Resource::Nofile, raised).is_ok() {
        return maximum.unwrap_or(u64::MAX);
    }
    current.unwrap_or(u64::MAX)
}

/// Client connections that so many descriptors are enough for. With very few of them, half are reserved.
fn affordable(descriptors: u64) -> u32 {
    let reserved = RESERVED.min(descriptors / 2);
    let connections = (descriptors - reserved) / PER_CONNECTION;
    u32::try_from(connections).unwrap_or(u32::MAX).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn share_of_the_descriptors_is_reserved() {
        for (descriptors, connections) in [
            (u64::MAX, u32::MAX),
            (1 << 20, 524_160),
            (1_024, 384),
            (400, 100),
            (0, 1),
        ] {
            assert_eq!(affordable(descriptors), connections, "{descriptors}");
        }
    }
}
