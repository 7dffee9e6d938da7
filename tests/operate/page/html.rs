//! A strict parser for a subset of HTML: tags and attributes, each tag closed where it was opened.

use std::collections::BTreeMap;

/// An opening tag.
#[derive(Debug, PartialEq, Eq)]
pub struct Tag {
    pub name: String,
    pub attributes: BTreeMap<String, String>,
    /// Text up to the next tag.
    pub text: String,
}

/// Tags without an end.
const VOID: [&str; 3] = ["meta", "link", "!DOCTYPE"];

/// All opening tags, in order. Panics if one is not closed, or closed inside another.
pub fn tags(page: &str) -> Vec<Tag> {
    let mut tags: Vec<Tag> = Vec::new();
    let mut open: Vec<String> = Vec::new();
    let mut rest = page;
    while let Some(at) = rest.find('<') {
        let text = &rest[..at];
        assert!(!text.contains('>'), "a bare > in {text:?}");
        if let Some(last) = tags.last_mut() {
            last.text.push_str(text);
        }
        rest = &rest[at + 1..];
        if let Some(comment) = rest.strip_prefix("!--") {
            rest = &comment[comment.find("-->").expect("a comment ends") + 3..];
            continue;
        }
        let end = rest.find('>').expect("a tag ends");
        let tag = &rest[..end];
        rest = &rest[end + 1..];
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop().as_deref(), Some(name), "after {text:?}");
            continue;
        }
        let name = tag.split([' ', '/']).next().unwrap().to_owned();
        if !tag.ends_with('/') && !VOID.contains(&name.as_str()) {
            open.push(name.clone());
        }
        tags.push(Tag {
            attributes: attributes(&tag[name.len()..]),
            name,
            text: String::new(),
        });
    }
    assert!(open.is_empty(), "never closed: {open:?}");
    tags
}

fn attributes(mut text: &str) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    loop {
        text = text.trim_start_matches([' ', '/']);
        if text.is_empty() {
            return found;
        }
        let end = text.find(['=', ' ']).unwrap_or(text.len());
        let name = text[..end].to_owned();
        text = &text[end..];
        let value = match text.strip_prefix("=\"") {
            Some(quoted) => {
                let (value, after) = quoted.split_once('"').expect("a value ends");
                text = after;
                value.to_owned()
            }
            None => {
                assert!(!text.starts_with('='), "{name} has a value without quotes");
                String::new()
            }
        };
        assert!(found.insert(name.clone(), value).is_none(), "{name} twice");
    }
}

/// Text directly in the tag with this id.
pub fn text_of<'a>(tags: &'a [Tag], id: &str) -> &'a str {
    let found = tags
        .iter()
        .find(|tag| tag.attributes.get("id").is_some_and(|known| known == id));
    &found.unwrap_or_else(|| panic!("no tag has the id {id}")).text
}
