//! A small keyspace with the layout of Kubernetes.

use anyhow::Result;
use bytes::Bytes;

use crate::read_target::ReadTarget;
use crate::rpc::EtcdClient;

/// Objects of one kind.
struct Resource {
    prefix: &'static str,
    kind: &'static str,
    objects: usize,
    value_bytes: usize,
}

const RESOURCES: [Resource; 3] = [
    Resource {
        prefix: "/registry/pods/",
        kind: "Pod",
        objects: 2_000,
        value_bytes: 1_024,
    },
    Resource {
        prefix: "/registry/configmaps/",
        kind: "ConfigMap",
        objects: 400,
        value_bytes: 512,
    },
    Resource {
        prefix: "/registry/leases/",
        kind: "Lease",
        objects: 200,
        value_bytes: 256,
    },
];

const NAMESPACES: usize = 20;

/// Below etcd's default limit of 128 operations in one transaction.
const PUTS_PER_TXN: usize = 100;

/// The pod that the tour reads and writes.
pub(crate) const ONE_POD: usize = 7;

fn key(resource: &Resource, index: usize) -> String {
    format!("{}ns-{:02}/web-{index:05}", resource.prefix, index % NAMESPACES)
}

/// A value of about the resource's size, which differs by `generation`.
fn value(resource: &Resource, index: usize, generation: usize) -> Bytes {
    let mut text = format!(
        r#"{{"kind":"{}","metadata":{{"name":"web-{index:05}","namespace":"ns-{:02}","generation":{generation}}},"spec":""#,
        resource.kind,
        index % NAMESPACES,
    );
    while text.len() + 2 < resource.value_bytes {
        text.push(char::from(
            b'a' + u8::try_from((index * 7 + text.len()) % 26).unwrap_or(0),
        ));
    }
    text.push_str("\"}");
    Bytes::from(text)
}

/// Key of a pod, and its value of this generation; those that [`fill`] writes have the generation 1.
pub(crate) fn pod(index: usize, generation: usize) -> (String, Bytes) {
    let pods = &RESOURCES[0];
    (key(pods, index), value(pods, index, generation))
}

/// Fills an empty etcd, and returns a description of the objects.
pub(crate) async fn fill(client: &mut EtcdClient) -> Result<String> {
    let mut parts = Vec::new();
    for resource in &RESOURCES {
        let indices: Vec<usize> = (0..resource.objects).collect();
        for batch in indices.chunks(PUTS_PER_TXN) {
            let pairs = batch
                .iter()
                .map(|&i| (key(resource, i), value(resource, i, 1)))
                .collect();
            client.put_all(pairs).await?;
        }
        parts.push(format!(
            "{} × {} B under {}",
            resource.objects, resource.value_bytes, resource.prefix
        ));
    }
    Ok(parts.join(", "))
}

/// The range that the tour reads, in the keyspace that [`fill`] writes.
pub(crate) fn read_target() -> Option<ReadTarget> {
    let pods = &RESOURCES[0];
    Some(ReadTarget {
        key: key(pods, ONE_POD).into(),
        start: Bytes::from_static(pods.prefix.as_bytes()),
        end: Bytes::from_static(b"/registry/pods0"),
        name: pods.prefix.to_owned(),
        keys: i64::try_from(pods.objects).ok()?,
    })
}
