//! Generates etcd's messages and the client stubs for the calls that rangecache makes itself, from our own minimal protocol
//! definitions.

/// Folder of the protocol definitions.
const PROTO: &str = "../../proto";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed={PROTO}");
    let descriptors = protox::compile(["etcd.proto", "health.proto"], [PROTO])?;
    tonic_prost_build::configure()
        .build_server(false)
        .build_transport(false)
        .bytes(".")
        .compile_fds(descriptors)?;
    Ok(())
}
