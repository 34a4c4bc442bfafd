//! JSON with a checksum: `{"checksum":"<BLAKE3 of body, hex>","body":{…}}`, without white space outside the body.
//! The checksum covers the exact bytes of the body, so no canonical form is needed.

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Record<'a> {
    checksum: String,
    #[serde(borrow)]
    body: &'a RawValue,
}

/// Why a text is not a valid record.
#[derive(Debug, thiserror::Error)]
pub(crate) enum InvalidRecord {
    /// The text is not the expected JSON.
    #[error("{0}")]
    Json(serde_json::Error),
    /// The checksum does not match.
    #[error("its checksum does not match")]
    Checksum {
        /// Computed now.
        found: String,
        /// Recorded.
        recorded: String,
    },
    /// The checksum does not cover white space around the parts, so only the exact form of `encode_body` is accepted.
    #[error("it has extra bytes")]
    ExtraBytes,
}

/// The text of `body`.
///
/// # Panics
/// When `body` has no JSON form.
pub(crate) fn body(body: &impl Serialize) -> String {
    serde_json::to_string(body).expect("it has a JSON form")
}

/// Encodes a body as a record.
///
/// # Panics
/// When `body` is not JSON.
pub(crate) fn encode_body(body: String) -> Vec<u8> {
    let checksum = blake3::hash(body.as_bytes()).to_hex().to_string();
    let body = RawValue::from_string(body).expect("it is JSON");
    serde_json::to_vec(&Record { checksum, body: &body }).expect("it has a JSON form")
}

/// Checks a record that [`encode_body`] wrote and returns its body.
///
/// # Errors
/// See [`InvalidRecord`].
pub(crate) fn open(text: &[u8]) -> Result<&str, InvalidRecord> {
    let record: Record = serde_json::from_slice(text).map_err(InvalidRecord::Json)?;
    let body = record.body.get();
    let found = blake3::hash(body.as_bytes()).to_hex().to_string();
    if found != record.checksum {
        return Err(InvalidRecord::Checksum { found, recorded: record.checksum });
    }
    // Also the order of the fields: each record has one spelling.
    let parts = [r#"{"checksum":""#, &record.checksum, r#"","body":"#, body];
    let rest = parts.iter().try_fold(text, |rest, part| rest.strip_prefix(part.as_bytes()));
    if rest == Some(b"}") { Ok(body) } else { Err(InvalidRecord::ExtraBytes) }
}

/// The version of a record, given its body.
pub(crate) fn version(body: &str) -> serde_json::Result<u32> {
    #[derive(Deserialize)]
    struct Version {
        version: u32,
    }
    serde_json::from_str(body).map(|Version { version }| version)
}
