//! Generates etcd's messages from our own minimal protocol definitions.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto/etcd.proto");
    let descriptors = protox::compile(["etcd.proto"], ["proto"])?;
    prost_build::Config::new()
        // Written by hand in pb.rs: a failed comparison has to be readable.
        .skip_debug(["etcdserverpb.KeyValue", "etcdserverpb.RangeRequest"])
        .compile_fds(descriptors)?;
    Ok(())
}
