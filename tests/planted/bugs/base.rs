//! Bugs of `rangecache-base`.

use super::{Bug, Change};

pub(super) const BUGS: &[Bug] = &[
    Bug {
        name: "52-count-two-codes-together",
        what: "two gRPC codes of a method share a counter",
        test: "--lib telemetry::metrics::calls::tests::every_counter_has_a_place_of_its_own",
        shows: "left: [2-9]",
        changes: &[Change {
            item: "CallMetrics::counter",
            find: "let place = of_method.get(usize::from(code.0))?.get(from as usize)?;",
            replace: "let place = of_method.get(usize::from(code.0 / 2))?.get(from as usize)?;",
        }],
    },
    Bug {
        name: "86-name-clients-by-their-whole-address",
        what: "a host has a name for each of its IPv6 addresses",
        test: "--lib telemetry::clients::name",
        shows: "name_is_that_of_the_certificate_otherwise_the_address_without_a_port",
        changes: &[Change {
            item: "ClientAddress::from",
            find: "let network = u128::from(address) >> 64 << 64;",
            replace: "let network = u128::from(address);",
        }],
    },
    Bug {
        name: "186-tell-leaves-how-loops-are-found",
        what: "a client that claims to be a leaf is told how loops are found",
        test: "-p rangecache-base --lib own_requests_are_recognized_among_those_of_others",
        shows: "assertion .left != right. failed",
        changes: &[Change {
            item: "Instance::unrelated",
            find: "Instance::simulated().unwrap_or_else(|| Instance(random_id()))",
            replace: "Instance::simulated().unwrap_or_else(|| Instance(ID.clone()))",
        }],
    },
];
