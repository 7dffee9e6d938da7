//! Resources: prefixes of all keys that one list reads.

/// Prefix of the resource that a key or a prefix belongs to: its first two parts, `/registry/pods/`; the first three of
/// resources in a group, `/registry/apps.example.com/jobs/`, and of the two kinds of Kubernetes' services. A prefix with fewer
/// parts is its own resource. Keys without parts are one resource, the empty prefix: what begins with the same letter has
/// nothing in common.
pub(super) fn resource_of(prefix: &[u8]) -> &[u8] {
    let ends = ends(prefix);
    if ends.is_empty() && prefix.first() != Some(&b'/') {
        return &[];
    }
    let parts = if has_resources(prefix) { 3 } else { 2 };
    ends.get(parts - 1).map_or(prefix, |end| &prefix[..=*end])
}

/// Whether the second part of `prefix` is a group of resources.
fn has_resources(prefix: &[u8]) -> bool {
    let ends = ends(prefix);
    let (Some(first), Some(second)) = (ends.first(), ends.get(1)) else {
        return false;
    };
    let part = &prefix[first + 1..*second];
    part.contains(&b'.') || part == b"services"
}

/// Whether `prefix` is a group of resources as a whole, which belongs divided.
pub(super) fn is_group(prefix: &[u8]) -> bool {
    has_resources(prefix) && ends(prefix).len() == 2
}

/// Positions of the slashes that end parts.
fn ends(prefix: &[u8]) -> Vec<usize> {
    let lead = usize::from(prefix.first() == Some(&b'/'));
    let slashes = prefix.iter().enumerate().skip(lead);
    slashes
        .filter(|(_, byte)| **byte == b'/')
        .map(|(at, _)| at)
        .collect()
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::super::model::KeyGroup;
    use super::*;
    use etcd_store::keyspace::PrefixGroup;

    #[test]
    fn resources_are_what_one_list_reads() {
        for (prefix, resource, group) in [
            ("/registry/pods/kube-system/", "/registry/pods/", false),
            ("/registry/pods/", "/registry/pods/", false),
            ("/registry/", "/registry/", false),
            ("/registry/health", "/registry/health", false),
            ("/registry/apps.example.com/", "/registry/apps.example.com/", true),
            (
                "/registry/apps.example.com/jobs/a/",
                "/registry/apps.example.com/jobs/",
                false,
            ),
            ("/registry/services/", "/registry/services/", true),
            ("/registry/services/specs/a/", "/registry/services/specs/", false),
            ("cilium/state/x/", "cilium/state/", false),
            ("lonely", "", false),
            ("l", "", false),
            ("/lonely", "/lonely", false),
            ("", "", false),
        ] {
            let found = String::from_utf8_lossy(resource_of(prefix.as_bytes()));
            assert_eq!(found, resource, "{prefix}");
            assert_eq!(is_group(prefix.as_bytes()), group, "{prefix}");
        }
        let pods = Bytes::from_static(b"/registry/pods/");
        let remainder = KeyGroup::new(PrefixGroup::default(), None, &pods);
        assert_eq!(remainder.resource, pods);
    }
}
