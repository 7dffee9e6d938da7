//! The message of a unary gRPC response.

use http::StatusCode;
use prost::Message;
use tonic::{Code, Status};

use super::response::Whole;
use etcd_wire::grpc::frame::{PREFIX_BYTES, Prefix};

/// The message of a unary response.
///
/// # Errors
/// The status of the response, or why it is none of gRPC's.
pub(crate) fn unary_message<R: Message + Default>(response: Whole) -> Result<R, Status> {
    let (parts, (body, trailers)) = response.into_parts();
    if parts.status != StatusCode::OK {
        return Err(Status::unavailable(format!(
            "the peer answers with {}",
            parts.status
        )));
    }
    match Status::from_header_map(trailers.as_ref().unwrap_or(&parts.headers)) {
        Some(status) if status.code() == Code::Ok => {}
        Some(status) => return Err(status),
        None => return Err(Status::unavailable("the peer answers without a status")),
    }
    let prefix = Prefix::parse(&body).filter(|prefix| !prefix.is_compressed);
    let message = body.get(PREFIX_BYTES..).unwrap_or_default();
    if prefix.is_none_or(|prefix| prefix.length_bytes as usize != message.len()) {
        return Err(Status::internal("the response is not one message"));
    }
    R::decode(message).map_err(|error| Status::internal(error.to_string()))
}
