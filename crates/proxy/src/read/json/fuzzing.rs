//! Fuzz target of the JSON of Ranges.

#![allow(
    clippy::panic,
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    reason = "compiled for tests and fuzz targets only"
)]

use std::collections::BTreeMap;

use arbitrary::{Arbitrary, Unstructured};
use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use etcd_store::cache::{RangeQuery, SortOrder, SortTarget};
use serde_json::{Value, json};

use super::{names_unknown_sort_target, parse};

/// Names of the fields as etcd defines them. The gateway accepts the same in camel case.
const NUMBERS: [&str; 6] = [
    "limit",
    "revision",
    "min_mod_revision",
    "max_mod_revision",
    "min_create_revision",
    "max_create_revision",
];
const FLAGS: [&str; 3] = ["serializable", "keys_only", "count_only"];

/// A request that etcd reads, in one of its forms.
#[derive(Arbitrary, Debug)]
struct Written {
    key: Vec<u8>,
    range_end: Vec<u8>,
    numbers: [i64; 6],
    sort: [u8; 2],
    flags: [bool; 3],
    /// Whether the name is in camel case, numbers are text, enums are names, and base64 is that of URLs.
    is_camel: bool,
    is_text: bool,
    is_named: bool,
    is_of_urls: bool,
    is_pretty: bool,
}

/// A body of `/v3/kv/range`: any text, which is read as JSON has it or not at all, and a request that is always read.
pub fn range_json(data: &[u8]) {
    if let Some((0..128, body)) = data.split_first() {
        check_text(body);
    } else if let Ok(written) =
        Written::arbitrary_take_rest(Unstructured::new(data.get(1..).unwrap_or_default()))
    {
        check_written(&written);
    }
}

fn check_text(body: &[u8]) {
    for any_base64 in [false, true] {
        let Ok(query) = parse(body, any_base64) else {
            continue;
        };
        let fields: BTreeMap<String, Value> =
            serde_json::from_slice(body).unwrap_or_else(|error| panic!("{error}"));
        let mut read = RangeQuery::default();
        for (name, value) in fields {
            set(&mut read, &snake_case(&name), &value, any_base64);
        }
        assert_eq!(query, read);
        assert!(
            !names_unknown_sort_target(body),
            "read, and refused for its sort target"
        );
    }
}

/// Sets one field, of which `parse` has accepted the value.
fn set(query: &mut RangeQuery, name: &str, value: &Value, any_base64: bool) {
    let number = || match value {
        Value::Number(number) => number.as_i64().unwrap_or_else(|| panic!("{number}")),
        Value::String(text) => {
            assert!(
                !text.starts_with('+') && (text == "0" || !text.trim_start_matches('-').starts_with('0'))
            );
            text.parse().unwrap_or_else(|_| panic!("{text}"))
        }
        other => panic!("{other} is no number"),
    };
    let named = |names: &[&str]| {
        let known = |text: &str| names.iter().position(|name| *name == text);
        let number = match value {
            Value::String(text) => known(text).unwrap_or_else(|| panic!("{text}")),
            other => other.as_u64().unwrap_or_else(|| panic!("{other}")) as usize,
        };
        assert!(number < names.len());
        number as i32
    };
    let flag = || value.as_bool().unwrap_or_else(|| panic!("{value} is no flag"));
    let bytes = || {
        let text = value.as_str().unwrap_or_else(|| panic!("{value} is no text"));
        assert!(any_base64 || (text.len().is_multiple_of(4) && !text.contains(['-', '_'])));
        let standard = text.replace('-', "+").replace('_', "/");
        let decoded = STANDARD.decode(format!(
            "{}{}",
            standard.trim_end_matches('='),
            padding(&standard)
        ));
        decoded.unwrap_or_else(|error| panic!("{text}: {error}")).into()
    };
    match name {
        "key" => query.key = bytes(),
        "range_end" => query.range_end = bytes(),
        "limit" => query.limit = number(),
        "revision" => query.revision = number(),
        "sort_order" => query.sort_order = named(&SortOrder::NAMES),
        "sort_target" => query.sort_target = named(&SortTarget::NAMES),
        "serializable" => query.serializable = flag(),
        "keys_only" => query.keys_only = flag(),
        "count_only" => query.count_only = flag(),
        "min_mod_revision" => query.min_mod_revision = number(),
        "max_mod_revision" => query.max_mod_revision = number(),
        "min_create_revision" => query.min_create_revision = number(),
        "max_create_revision" => query.max_create_revision = number(),
        other => panic!("{other} is no field of a Range"),
    }
}

fn padding(text: &str) -> &'static str {
    ["", "===", "==", "="][text.trim_end_matches('=').len() % 4]
}

fn snake_case(name: &str) -> String {
    let mut snake = String::new();
    for letter in name.chars() {
        if letter.is_ascii_uppercase() {
            snake.push('_');
        }
        snake.push(letter.to_ascii_lowercase());
    }
    snake
}

fn check_written(written: &Written) {
    let [
        limit,
        revision,
        min_mod_revision,
        max_mod_revision,
        min_create_revision,
        max_create_revision,
    ] = written.numbers;
    let [serializable, keys_only, count_only] = written.flags;
    let (sort_order, sort_target) = (written.sort[0] % 3, written.sort[1] % 5);
    let query = RangeQuery {
        key: written.key.clone().into(),
        range_end: written.range_end.clone().into(),
        limit,
        revision,
        sort_order: sort_order.into(),
        sort_target: sort_target.into(),
        serializable,
        keys_only,
        count_only,
        min_mod_revision,
        max_mod_revision,
        min_create_revision,
        max_create_revision,
    };
    let named = |name: &str| {
        if written.is_camel {
            camel_case(name)
        } else {
            name.to_owned()
        }
    };
    let mut fields = serde_json::Map::new();
    let text = |bytes: &[u8]| {
        let engine = if written.is_of_urls {
            &URL_SAFE_NO_PAD
        } else {
            &STANDARD
        };
        json!(engine.encode(bytes))
    };
    fields.insert("key".to_owned(), text(&query.key));
    fields.insert(named("range_end"), text(&query.range_end));
    for (name, number) in NUMBERS.iter().zip(written.numbers) {
        let value = if written.is_text {
            json!(number.to_string())
        } else {
            json!(number)
        };
        fields.insert(named(name), value);
    }
    for (name, flag) in FLAGS.iter().zip(written.flags) {
        fields.insert(named(name), json!(flag));
    }
    let one_of = |names: &[&str], number: u8| {
        if written.is_named {
            json!(names[usize::from(number)])
        } else {
            json!(number)
        }
    };
    fields.insert(named("sort_order"), one_of(&SortOrder::NAMES, sort_order));
    fields.insert(named("sort_target"), one_of(&SortTarget::NAMES, sort_target));
    let value = Value::Object(fields);
    let body = if written.is_pretty {
        format!("{value:#}")
    } else {
        value.to_string()
    };
    assert_eq!(parse(body.as_bytes(), true), Ok(query.clone()), "{body}");
    if !written.is_of_urls {
        assert_eq!(parse(body.as_bytes(), false), Ok(query), "{body}");
    }
    assert!(!names_unknown_sort_target(body.as_bytes()), "{body}");
    let unknown = body.replacen('{', &format!("{{\"{}\":7,", "sortTarget"), 1);
    if !written.is_camel {
        assert!(names_unknown_sort_target(unknown.as_bytes()), "{unknown}");
    }
}

fn camel_case(name: &str) -> String {
    let mut parts = name.split('_');
    let mut camel = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        camel.push_str(&part[..1].to_ascii_uppercase());
        camel.push_str(&part[1..]);
    }
    camel
}
