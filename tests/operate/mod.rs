//! Tests of operation: starts, stops and hand-overs, `rangecache doctor`, TLS, traces, the status page.

mod access_log;
mod browsers;
mod caller_is;
mod calls;
mod clients;
mod core_dumps;
mod diff;
mod doctor;
mod forward_all;
mod loops;
mod operations;
mod outage;
mod page;
mod prefixes;
mod read_only;
mod reload;
mod residency;
mod running;
mod tls;
mod traces;
