//! Generates the client stubs for the calls that rangecache makes itself, from our own minimal protocol definitions.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto/etcd.proto");
    println!("cargo:rerun-if-changed=proto/health.proto");
    let descriptors = protox::compile(["etcd.proto", "health.proto"], ["proto"])?;
    tonic_prost_build::configure()
        .build_server(false)
        .build_transport(false)
        .bytes(".")
        .compile_fds(descriptors)?;
    Ok(())
}
