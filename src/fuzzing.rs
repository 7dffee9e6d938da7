//! Fuzz targets: for the programs in `fuzz/`, and for the test that replays their corpora.
//!
//! Each target lies in the room that it tests. It compares with a model, or with another decoder, and panics at a
//! difference.

use etcd_store::cache;
use etcd_wire::{grpc, protobuf};
use rangecache_config as config;
use rangecache_edge::server;
use rangecache_mirror as mirror;
use rangecache_proxy as proxy;
use rangecache_upstream as upstream;

/// A target and its name, which is that of its program and of the folder of its corpus.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Name.
    pub name: &'static str,
    /// Runs one input.
    pub run: fn(&[u8]),
}

/// Defines the list of the targets.
macro_rules! targets {
    ($($name:ident: $run:path;)*) => {
        /// Every target.
        pub static TARGETS: &[Target] = &[$(Target { name: stringify!($name), run: $run }),*];
        $(
            #[doc = concat!("Runs the target `", stringify!($name), "`.")]
            pub fn $name(data: &[u8]) {
                $run(data);
            }
        )*
    };
}

targets! {
    range_plan: proxy::fuzzing::range_plan;
    query: cache::fuzzing::query;
    tree: cache::fuzzing::tree;
    feed: mirror::fuzzing::feed;
    image: mirror::fuzzing::image;
    fields: protobuf::fuzzing::fields;
    scanners: grpc::fuzzing::scanners;
    range_json: proxy::fuzzing::range_json;
    watch_session: proxy::fuzzing::watch_session;
    connection: server::fuzzing::connection;
    lean: upstream::fuzzing::lean;
    config: config::fuzzing::config;
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// Inputs that cargo-fuzz has found, one for each path through the code.
    #[test]
    fn corpora_are_replayed() {
        let fuzz = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz");
        for Target { name, run } in TARGETS {
            assert!(
                fuzz.join(format!("targets/{name}.rs")).exists(),
                "{name} has no program"
            );
            let inputs = std::fs::read_dir(fuzz.join("corpus").join(name)).unwrap();
            let mut count = 0;
            for input in inputs {
                let path = input.unwrap().path();
                println!("{}", path.display());
                run(&std::fs::read(path).unwrap());
                count += 1;
            }
            assert!(count > 0, "{name} has no corpus");
        }
    }
}
