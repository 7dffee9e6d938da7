//! Access log entry of a call, and its line.

use std::time::{Duration, SystemTime};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use etcd_wire::etcdserverpb::RangeRequest;
use serde::ser::{Serialize, SerializeMap, Serializer};

use crate::telemetry::{clients::ClientName, trace::TraceId};

/// Longest key that is logged, in bytes.
pub const MAX_KEY_BYTES: usize = 2 << 10;

/// Access log entry of a finished call.
#[derive(Debug)]
pub struct LogEntry {
    /// When the call arrived.
    pub arrived_at: SystemTime,
    /// Client of the connection: common name of its certificate, address, or `unix`.
    pub client: ClientName,
    /// User of etcd whose token the call has, if it is known.
    pub user: Option<ClientName>,
    /// `service/method` of a gRPC call, otherwise the path.
    pub method: String,
    /// Of a Range, a RangeStream or the first create request of a watch.
    pub range: Option<RangeFacts>,
    /// Revision in the header of the last response that shows one; 0 for none.
    pub header_revision: i64,
    /// Outcome and reason of a read; `memory` or `etcd`, and the reason, of a watch.
    pub outcome: Option<(&'static str, &'static str)>,
    /// gRPC code.
    pub code: Option<u16>,
    /// HTTP status of a call that is not gRPC.
    pub http_status: Option<u16>,
    /// Bytes of the response's data.
    pub bytes: u64,
    /// Events sent to the watchers of a Watch stream.
    pub events: Option<u64>,
    /// Parts of the duration.
    pub phases: Phases,
    /// Trace that the call belongs to.
    pub trace_id: Option<TraceId>,
}

impl LogEntry {
    /// A call of which nothing else is known yet.
    pub fn new(arrived_at: SystemTime, client: ClientName, method: String) -> LogEntry {
        LogEntry {
            arrived_at,
            client,
            user: None,
            method,
            range: None,
            header_revision: 0,
            outcome: None,
            code: None,
            http_status: None,
            bytes: 0,
            events: None,
            phases: Phases::default(),
            trace_id: None,
        }
    }
}

/// Parts of a call's duration.
#[derive(Clone, Copy, Debug, Default)]
pub struct Phases {
    /// Until memory was proven fresh; `None` if it was not.
    pub prove: Option<Duration>,
    /// From then on, or from the start, until the response began.
    pub respond: Duration,
    /// From then on until the end of the response.
    pub send: Duration,
}

/// Request of a read, as it is logged.
#[derive(Debug, Default)]
pub struct RangeFacts {
    /// At most the first two parts of the keys' common prefix.
    pub prefix: String,
    /// Key and range end, if keys are logged.
    pub keys: Option<(Vec<u8>, Vec<u8>)>,
    /// Whether a key is too long to be logged.
    pub is_cut: bool,
    /// Options of the request. Its keys are empty: the logged ones are in `keys`.
    pub options: RangeRequest,
}

impl Serialize for LogEntry {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut line = serializer.serialize_map(None)?;
        let time = humantime::format_rfc3339_micros(self.arrived_at).to_string();
        line.serialize_entry("time", &time)?;
        line.serialize_entry("client", self.client.as_str())?;
        if let Some(user) = &self.user {
            line.serialize_entry("user", user.as_str())?;
        }
        line.serialize_entry("method", &self.method)?;
        if let Some(range) = &self.range {
            range.serialize_into(&mut line)?;
        }
        if self.header_revision != 0 {
            line.serialize_entry("header_revision", &self.header_revision)?;
        }
        if let Some((outcome, reason)) = self.outcome {
            line.serialize_entry("outcome", outcome)?;
            if !reason.is_empty() {
                line.serialize_entry("reason", reason)?;
            }
        }
        if let Some(code) = self.code {
            line.serialize_entry("code", &code)?;
        }
        if let Some(status) = self.http_status {
            line.serialize_entry("http_status", &status)?;
        }
        line.serialize_entry("bytes", &self.bytes)?;
        if let Some(events) = self.events {
            line.serialize_entry("events", &events)?;
        }
        let Phases { prove, respond, send } = self.phases;
        let duration = prove.unwrap_or_default() + respond + send;
        line.serialize_entry("duration_us", &micros(duration))?;
        if let Some(prove) = prove {
            line.serialize_entry("prove_us", &micros(prove))?;
        }
        line.serialize_entry("respond_us", &micros(respond))?;
        line.serialize_entry("send_us", &micros(send))?;
        if let Some(trace_id) = self.trace_id {
            line.serialize_entry("trace_id", &trace_id.to_string())?;
        }
        line.end()
    }
}

impl RangeFacts {
    fn serialize_into<M: SerializeMap>(&self, line: &mut M) -> Result<(), M::Error> {
        line.serialize_entry("prefix", &self.prefix)?;
        if let Some((key, range_end)) = &self.keys {
            serialize_key(line, ["key", "key_base64"], key)?;
            if !range_end.is_empty() {
                serialize_key(line, ["range_end", "range_end_base64"], range_end)?;
            }
        }
        if self.is_cut {
            line.serialize_entry("key_too_long", &true)?;
        }
        // Without `..`, so that a new option does not compile until it is logged.
        let RangeRequest {
            key: _,
            range_end: _,
            limit,
            revision,
            sort_order,
            sort_target,
            serializable,
            keys_only,
            count_only,
            min_mod_revision,
            max_mod_revision,
            min_create_revision,
            max_create_revision,
        } = self.options;
        for (name, number) in [
            ("revision", revision),
            ("limit", limit),
            ("sort_order", sort_order.into()),
            ("sort_target", sort_target.into()),
        ] {
            if number != 0 {
                line.serialize_entry(name, &number)?;
            }
        }
        for (name, is_set) in [
            ("keys_only", keys_only),
            ("count_only", count_only),
            ("serializable", serializable),
        ] {
            if is_set {
                line.serialize_entry(name, &true)?;
            }
        }
        for (name, bound) in [
            ("min_mod_revision", min_mod_revision),
            ("max_mod_revision", max_mod_revision),
            ("min_create_revision", min_create_revision),
            ("max_create_revision", max_create_revision),
        ] {
            if bound != 0 {
                line.serialize_entry(name, &bound)?;
            }
        }
        Ok(())
    }
}

/// Writes a key as text, or in base64 under the second name if it is not UTF-8.
fn serialize_key<M: SerializeMap>(line: &mut M, names: [&str; 2], key: &[u8]) -> Result<(), M::Error> {
    match std::str::from_utf8(key) {
        Ok(text) => line.serialize_entry(names[0], text),
        Err(_) => line.serialize_entry(names[1], &STANDARD.encode(key)),
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn line_contains_what_is_set_and_nothing_else() {
        let arrived_at = SystemTime::UNIX_EPOCH + Duration::from_micros(1_700_000_000_000_042);
        let client = ClientName::of_connection(None, Some(Ipv4Addr::new(10, 0, 0, 1).into()));
        let mut entry = LogEntry {
            user: Some(ClientName::of_user("alice")),
            code: Some(0),
            bytes: 7,
            ..LogEntry::new(arrived_at, client, "etcdserverpb.KV/Put".to_owned())
        };
        let line = serde_json::to_string(&entry).unwrap();
        assert_eq!(
            line,
            "{\"time\":\"2023-11-14T22:13:20.000042Z\",\"client\":\"10.0.0.1\",\"user\":\"alice\",\"method\":\"etcdserverpb.KV/Put\",\
             \"code\":0,\"bytes\":7,\"duration_us\":0,\"respond_us\":0,\"send_us\":0}"
        );
        entry.range = Some(RangeFacts {
            prefix: "/a/".to_owned(),
            keys: Some((b"/a/\n\"".to_vec(), vec![0xff])),
            options: RangeRequest {
                limit: 5,
                serializable: true,
                max_mod_revision: 3,
                ..RangeRequest::default()
            },
            ..RangeFacts::default()
        });
        entry.outcome = Some(("hit", "serializable"));
        entry.phases.prove = Some(Duration::from_micros(5));
        entry.phases.send = Duration::from_micros(2);
        let line = serde_json::to_string(&entry).unwrap();
        assert!(
            line.contains(
                "\"prefix\":\"/a/\",\"key\":\"/a/\\n\\\"\",\"range_end_base64\":\"/w==\",\"limit\":5,\
                 \"serializable\":true,\"max_mod_revision\":3,\"outcome\":\"hit\",\"reason\":\"serializable\""
            ),
            "{line}"
        );
        assert!(
            line.ends_with("\"duration_us\":7,\"prove_us\":5,\"respond_us\":0,\"send_us\":2}"),
            "{line}"
        );
    }
}
