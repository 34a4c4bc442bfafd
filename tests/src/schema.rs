//! The outputs of commands against the JSON schemas in `docs/schemas`. Only the keywords that these schemas use are known.
//!
//! The schemas allow fields that they do not name, since later versions may add some. The tests do not: a new field has to
//! be described.

use serde_json::{Map, Value};
use std::path::Path;

/// The commands that print the same again and need no argument.
pub const QUERIES: [&str; 6] = ["status", "ls", "explain", "logs", "report", "ps"];

/// Keywords that describe, and do not restrict.
const REMARKS: [&str; 4] = ["$schema", "$defs", "title", "description"];

/// Checks the output of a command against its schema.
///
/// # Panics
/// When it does not match, or the schema cannot be read.
pub fn check(command: &str, output: &Value) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../docs/schemas/{command}.json"));
    let text = std::fs::read_to_string(&path).expect("the schema can be read");
    let root: Value = serde_json::from_str(&text).expect("the schema is JSON");
    if let Err(problem) = matches(&root, &root, output, command) {
        panic!("{problem}\nin {output:#}");
    }
}

/// Whether a value matches a schema; `at` is its place, for the message.
fn matches(root: &Value, schema: &Value, value: &Value, at: &str) -> Result<(), String> {
    let schema = schema.as_object().ok_or_else(|| format!("{at}: the schema is not an object"))?;
    for (keyword, wanted) in schema {
        let is_right = match keyword.as_str() {
            keyword if REMARKS.contains(&keyword) => true,
            "$ref" => {
                let name = wanted.as_str().and_then(|name| name.strip_prefix("#/$defs/"));
                let target = name.and_then(|name| root["$defs"].get(name));
                let target = target.ok_or_else(|| format!("{at}: there is no {wanted}"))?;
                return matches(root, target, value, at);
            }
            "anyOf" => {
                let results: Vec<_> = of(wanted).iter().map(|one| matches(root, one, value, at)).collect();
                if !results.iter().any(Result::is_ok) {
                    return Err(results
                        .into_iter()
                        .filter_map(Result::err)
                        .collect::<Vec<_>>()
                        .join("; or "));
                }
                true
            }
            "type" => {
                wanted.as_str().is_some_and(|name| is_a(value, name))
                    || of(wanted).iter().filter_map(Value::as_str).any(|name| is_a(value, name))
            }
            "enum" => of(wanted).contains(value),
            "const" => wanted == value,
            "minimum" => {
                value.as_f64().is_none_or(|value| wanted.as_f64().is_some_and(|least| value >= least))
            }
            "maximum" => value.as_f64().is_none_or(|value| wanted.as_f64().is_some_and(|most| value <= most)),
            "required" => {
                let is_there = |name: &Value| name.as_str().is_some_and(|name| value.get(name).is_some());
                !value.is_object() || of(wanted).iter().all(is_there)
            }
            "items" => {
                for (index, item) in of(value).iter().enumerate() {
                    matches(root, wanted, item, &format!("{at}[{index}]"))?;
                }
                true
            }
            "properties" | "additionalProperties" => {
                fields(root, schema, value, at)?;
                true
            }
            other => return Err(format!("{at}: the keyword {other} is not known here")),
        };
        if !is_right {
            return Err(format!("{at}: {value} is not as {keyword:?} says: {wanted}"));
        }
    }
    Ok(())
}

/// Every field has a schema of its own.
fn fields(root: &Value, schema: &Map<String, Value>, value: &Value, at: &str) -> Result<(), String> {
    for (name, field) in value.as_object().into_iter().flatten() {
        let named = schema.get("properties").and_then(|properties| properties.get(name));
        let of_field = named.or_else(|| schema.get("additionalProperties"));
        let of_field = of_field.ok_or_else(|| format!("{at}: the schema does not describe {name}"))?;
        matches(root, of_field, field, &format!("{at}.{name}"))?;
    }
    Ok(())
}

fn of(list: &Value) -> &[Value] {
    list.as_array().map_or(&[], Vec::as_slice)
}

fn is_a(value: &Value, name: &str) -> bool {
    match name {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        "string" => value.is_string(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn problem(schema: &Value, value: &Value) -> String {
        matches(schema, schema, value, "it").err().unwrap_or_default()
    }

    #[test]
    fn what_does_not_match_is_named() {
        let schema = json!({
            "$defs": {"name": {"type": "string"}},
            "type": "object",
            "properties": {
                "a": {"type": ["integer", "null"], "minimum": 0},
                "b": {"type": "array", "items": {"$ref": "#/$defs/name"}},
                "c": {"anyOf": [{"type": "null"}, {"type": "object", "additionalProperties": {"enum": ["x"]}}]},
            },
            "required": ["a"],
        });
        assert_eq!(problem(&schema, &json!({"a": null, "b": ["x"], "c": {"any": "x"}})), "");
        for (value, named) in [
            (json!([]), "\"type\""),
            (json!({"b": []}), "\"required\""),
            (json!({"a": -1}), "it.a: -1"),
            (json!({"a": 1.5}), "it.a: 1.5"),
            (json!({"a": 1, "b": [1]}), "it.b[0]: 1"),
            (json!({"a": 1, "c": {"any": "y"}}), "it.c.any: \"y\""),
            (json!({"a": 1, "d": 1}), "does not describe d"),
        ] {
            assert!(problem(&schema, &value).contains(named), "{value}: {}", problem(&schema, &value));
        }
        assert!(problem(&json!({"pattern": "x"}), &json!(1)).contains("pattern is not known"));
    }
}
