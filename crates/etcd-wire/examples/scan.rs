//! Scans the response to a Range that arrives byte by byte, and names the bytes that hold its key-values.

#![allow(clippy::print_stdout, reason = "an example shows what it finds")]

use std::error::Error;

use etcd_wire::etcdserverpb::{RangeResponse, ResponseHeader};
use etcd_wire::grpc::RangeResponseScanner;
use prost::Message as _;

fn main() -> Result<(), Box<dyn Error>> {
    let body = body(&["/registry/pods/default/a", "/registry/pods/default/b"])?;
    let mut scanner = RangeResponseScanner::unary();
    let mut kept = 0;
    for byte in &body {
        scanner.scan(std::slice::from_ref(byte), |range| kept += range.len())?;
    }
    let summary = scanner.finish()?;
    println!(
        "{} of {} bytes are {} key-values at revision {}; the last key is {}",
        kept,
        body.len(),
        summary.kvs,
        summary.header()?.revision,
        String::from_utf8_lossy(&summary.last_key)
    );
    Ok(())
}

/// The body of a response with these keys, each with the value `v`: a flag, four bytes of length, the message.
fn body(keys: &[&str]) -> Result<Vec<u8>, Box<dyn Error>> {
    let header = ResponseHeader {
        revision: 7,
        ..ResponseHeader::default()
    };
    let response = RangeResponse {
        header: Some(header),
        ..RangeResponse::default()
    };
    let mut message = response.encode_to_vec();
    for key in keys {
        let key_length = u8::try_from(key.len())?;
        let key_value = [&[0x0a, key_length][..], key.as_bytes(), &[0x2a, 1, b'v']].concat();
        message.extend([0x12, u8::try_from(key_value.len())?]);
        message.extend(key_value);
    }
    let length = u32::try_from(message.len())?;
    Ok([&[0][..], &length.to_be_bytes(), &message].concat())
}
