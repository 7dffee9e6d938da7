//! The JSON of a RangeRequest, as far as every version of etcd understands it in the same way.
//!
//! Not everything that etcd accepts is accepted here: what is rarely sent, or differs between etcd's libraries (unknown and
//! repeated fields, `null`, numbers with a fraction or an exponent), is left to etcd.

use serde::Deserialize;
use serde_json::Value;

use crate::gateway::{Enum, Int64, NotUnderstood, decode};
use etcd_store::cache::{RangeQuery, SortOrder, SortTarget};

/// The fields under both of their names.
#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
#[derive(Default)]
struct RangeFields {
    key: String,
    #[serde(alias = "rangeEnd")]
    range_end: String,
    limit: Int64,
    revision: Int64,
    #[serde(alias = "sortOrder")]
    sort_order: Enum,
    #[serde(alias = "sortTarget")]
    sort_target: Enum,
    serializable: bool,
    #[serde(alias = "keysOnly")]
    keys_only: bool,
    #[serde(alias = "countOnly")]
    count_only: bool,
    #[serde(alias = "minModRevision")]
    min_mod_revision: Int64,
    #[serde(alias = "maxModRevision")]
    max_mod_revision: Int64,
    #[serde(alias = "minCreateRevision")]
    min_create_revision: Int64,
    #[serde(alias = "maxCreateRevision")]
    max_create_revision: Int64,
}

/// Reads the body of a request. With `any_base64`, the forms without padding and with the characters of URLs are accepted,
/// too: etcd 3.6 and later accept them.
///
/// # Errors
/// [`NotUnderstood`] if only etcd can read it.
pub(super) fn parse(body: &[u8], any_base64: bool) -> Result<RangeQuery, NotUnderstood> {
    // serde reads a list as the fields in their order, too.
    if body.trim_ascii_start().first() != Some(&b'{') {
        return Err(NotUnderstood);
    }
    let fields: RangeFields = serde_json::from_slice(body).map_err(|_| NotUnderstood)?;
    Ok(RangeQuery {
        key: decode(&fields.key, any_base64)?,
        range_end: decode(&fields.range_end, any_base64)?,
        limit: fields.limit.value()?,
        revision: fields.revision.value()?,
        sort_order: fields.sort_order.value(&SortOrder::NAMES)?,
        sort_target: fields.sort_target.value(&SortTarget::NAMES)?,
        serializable: fields.serializable,
        keys_only: fields.keys_only,
        count_only: fields.count_only,
        min_mod_revision: fields.min_mod_revision.value()?,
        max_mod_revision: fields.max_mod_revision.value()?,
        min_create_revision: fields.min_create_revision.value()?,
        max_create_revision: fields.max_create_revision.value()?,
    })
}

/// Whether the body names a sort target by a number that etcd does not know, in whatever text is around it.
pub(super) fn names_unknown_sort_target(body: &[u8]) -> bool {
    let mut values = serde_json::Deserializer::from_slice(body).into_iter::<Value>();
    let Some(Ok(Value::Object(fields))) = values.next() else {
        return false;
    };
    let known = 0..i64::try_from(SortTarget::NAMES.len()).unwrap_or(0);
    ["sort_target", "sortTarget"]
        .iter()
        .filter_map(|name| fields.get(*name)?.as_i64())
        .any(|number| !known.contains(&number))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(body: &str) -> Result<RangeQuery, NotUnderstood> {
        parse(body.as_bytes(), true)
    }

    #[test]
    fn fields_are_read_under_both_names_and_in_all_forms() {
        let query = RangeQuery {
            key: "a".into(),
            range_end: "\0".into(),
            limit: -1,
            revision: i64::MAX,
            sort_order: 2,
            sort_target: 3,
            serializable: true,
            keys_only: true,
            count_only: true,
            min_mod_revision: 1,
            max_mod_revision: 2,
            min_create_revision: 3,
            max_create_revision: 4,
        };
        for body in [
            r#"{"key":"YQ==","range_end":"AA==","limit":-1,"revision":"9223372036854775807","sort_order":"DESCEND",
                "sort_target":"MOD","serializable":true,"keys_only":true,"count_only":true,"min_mod_revision":1,
                "max_mod_revision":"2","min_create_revision":3,"max_create_revision":4}"#,
            r#" {"rangeEnd":"AA==","key":"YQ\u003d=","limit":"-1","revision":9223372036854775807,"sortOrder":2,
                "sortTarget":3,"serializable":true,"keysOnly":true,"countOnly":true,"minModRevision":"1",
                "maxModRevision":2,"minCreateRevision":"3","maxCreateRevision":"4"} "#,
        ] {
            assert_eq!(parsed(body), Ok(query.clone()), "{body}");
        }
        assert_eq!(parsed("{}"), Ok(RangeQuery::default()));
    }

    #[test]
    fn base64_without_padding_or_for_urls_is_read_only_where_etcd_reads_it() {
        for (text, bytes) in [
            ("_-8=", &b"\xff\xef"[..]),
            ("_-8", b"\xff\xef"),
            ("/+8", b"\xff\xef"),
        ] {
            let body = format!(r#"{{"key":"{text}"}}"#);
            assert_eq!(parsed(&body).unwrap().key, bytes, "{text}");
            assert_eq!(parse(body.as_bytes(), false), Err(NotUnderstood), "{text}");
        }
        assert_eq!(parse(br#"{"key":"/+8="}"#, false).unwrap().key, &b"\xff\xef"[..]);
    }

    #[test]
    fn unknown_numbers_of_sort_targets_are_found_in_any_text() {
        for body in [
            r#"{"sort_target":5}"#,
            r#"{"a":null,"sortTarget":-1}{}"#,
            r#"{"sort_target":1,"sort_target":9} x"#,
        ] {
            assert!(names_unknown_sort_target(body.as_bytes()), "{body}");
        }
        for body in ["", "[5]", "{}", r#"{"sort_target":4}"#, r#"{"sort_target":"9"}"#] {
            assert!(!names_unknown_sort_target(body.as_bytes()), "{body}");
        }
    }

    #[test]
    fn what_versions_read_differently_is_left_to_etcd() {
        for body in [
            "",
            "{",
            "[]",
            r#" ["YQ=="]"#,
            "null",
            "{} x",
            "{}{}",
            r#"{"key":null}"#,
            r#"{"key":"YQ==","key":"YQ=="}"#,
            r#"{"range_end":"YQ==","rangeEnd":"YQ=="}"#,
            r#"{"other":1}"#,
            r#"{"Key":"YQ=="}"#,
            r#"{"key":"!"}"#,
            r#"{"key":"YR=="}"#,
            r#"{"key":"+_8="}"#,
            r#"{"limit":1.0}"#,
            r#"{"limit":1e2}"#,
            r#"{"limit":"01"}"#,
            r#"{"limit":"+1"}"#,
            r#"{"limit":" 1"}"#,
            r#"{"limit":""}"#,
            r#"{"limit":9223372036854775808}"#,
            r#"{"serializable":"true"}"#,
            r#"{"serializable":1}"#,
            r#"{"sort_order":"descend"}"#,
            r#"{"sort_order":"2"}"#,
            r#"{"sort_order":3}"#,
            r#"{"sort_order":-1}"#,
            r#"{"sort_target":5}"#,
        ] {
            assert_eq!(parsed(body), Err(NotUnderstood), "{body}");
        }
    }
}
