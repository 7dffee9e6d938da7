//! Totals per resource: all keys that one list reads. In a Kubernetes keyspace that is a type of objects in all namespaces,
//! so that the groups into which a large resource was divided are summed up again.

use bytes::Bytes;

use super::model::{KeyGroup, Keyspace, SizeSample};
use etcd_store::keyspace::PrefixGroup;

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

/// A resource and the groups into which it was divided.
#[derive(Debug)]
pub(super) struct Resource<'a> {
    /// The sum of the groups, under the resource's prefix.
    pub(super) total: KeyGroup,
    /// In key order; the total alone if it was not divided.
    pub(super) groups: Vec<&'a KeyGroup>,
}

impl Keyspace {
    /// The resources in key order. Keys of one resource that are mirrored and those that are not have totals of their own.
    pub(super) fn resources(&self) -> Vec<Resource<'_>> {
        let mut resources: Vec<Resource<'_>> = Vec::new();
        for group in &self.groups {
            let same = resources.iter_mut().find(|known| {
                known.total.range.prefix == group.resource && known.total.mirror == group.mirror
            });
            match same {
                Some(known) => known.add(group),
                None => resources.push(Resource::new(group)),
            }
        }
        resources
    }
}

impl<'a> Resource<'a> {
    fn new(group: &'a KeyGroup) -> Resource<'a> {
        let range = PrefixGroup {
            prefix: group.resource.clone(),
            keys: 0,
            ..group.range.clone()
        };
        let total = KeyGroup {
            range,
            sample: SizeSample::default(),
            ..group.clone()
        };
        let mut resource = Resource {
            total,
            groups: Vec::new(),
        };
        resource.add(group);
        resource
    }

    /// Adds the estimates of a group, which samples of different density would distort.
    fn add(&mut self, group: &'a KeyGroup) {
        self.total.range.keys += group.range.keys;
        self.total.range.end = group.range.end.clone();
        self.total.sample = self.total.sample.join(group.estimate());
        self.groups.push(group);
    }
}

/// The resource of a group at `prefix`, which is empty for a remainder of `parent`.
pub(super) fn resource_in(prefix: &Bytes, parent: &Bytes) -> Bytes {
    let of = if prefix.is_empty() { parent } else { prefix };
    Bytes::copy_from_slice(resource_of(of))
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let remainder = resource_in(&Bytes::new(), &Bytes::from_static(b"/registry/pods/"));
        assert_eq!(remainder, "/registry/pods/");
    }
}
