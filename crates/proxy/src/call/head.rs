//! [`CallHead`]: what the head of a request says about its call, read once.

use http::{Request, Version};

use etcd_wire::grpc::Method;
use etcd_wire::grpc::fields::HeadFields;
use rangecache_base::net::Transport;
use rangecache_base::telemetry::metrics::CallMethod;
use rangecache_base::telemetry::outcome::Kind;

/// Facts that decide about a call before its message is read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CallHead {
    /// Method, by the path.
    pub(crate) method: Method,
    /// The request came by HTTP/2.
    pub(crate) is_http2: bool,
    /// The request came by TLS.
    pub(crate) is_tls: bool,
    /// Its header fields, read in one pass.
    pub(crate) fields: HeadFields,
    /// etcd's HTTP server answers it, not its gRPC server. With TLS, etcd serves `/health` and the JSON gateway over HTTP/2,
    /// too. Without TLS, its HTTP/2 is gRPC only.
    pub(crate) is_http: bool,
    /// etcd's gRPC server finds the method: it takes a query for a part of the path.
    pub(crate) is_grpc_call: bool,
}

impl CallHead {
    /// Reads the head of `request`, which came by `transport`.
    pub(crate) fn of<B>(request: &Request<B>, transport: Transport) -> CallHead {
        let is_http2 = request.version() == Version::HTTP_2;
        let fields = HeadFields::of(request.headers());
        CallHead {
            method: Method::from_path(request.uri().path()),
            is_http2,
            is_tls: transport.tls,
            fields,
            is_http: !is_http2 || (transport.tls && !fields.is_grpc()),
            is_grpc_call: request.method() == http::Method::POST && request.uri().query().is_none(),
        }
    }

    /// Method by which the call is counted; `None` if it is not gRPC.
    pub(crate) fn counted(&self, path: &str) -> Option<CallMethod> {
        (self.is_http2 && self.fields.is_grpc()).then(|| CallMethod::of_path(path))
    }

    /// Kind of read under which the call is counted; `None` if it is not a read.
    pub(crate) fn read_kind(&self) -> Option<Kind> {
        match self.method {
            Method::Range => Some(Kind::Unary),
            Method::RangeStream => Some(Kind::Stream),
            _ => None,
        }
    }
}
