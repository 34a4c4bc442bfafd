//! JSON with a checksum: `{"checksum":"<BLAKE3 of body, hex>","body":{…}}`, without white space outside of the body.
//! The checksum covers the body's bytes as they stand, so that no canonical form is needed.

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Record<'a> {
    checksum: String,
    #[serde(borrow)]
    body: &'a RawValue,
}

/// Why a text is not such a record.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotIt {
    /// It does not parse.
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
    /// White space around the parts is not under the checksum: only what `encode` writes is taken.
    #[error("it has extra bytes")]
    ExtraBytes,
}

/// The text to store.
///
/// # Panics
/// When `body` has no JSON form.
pub(crate) fn encode(body: &impl Serialize) -> Vec<u8> {
    let body = serde_json::to_string(body).expect("it has a JSON form");
    let checksum = blake3::hash(body.as_bytes()).to_hex().to_string();
    let body = RawValue::from_string(body).expect("it was JSON just now");
    serde_json::to_vec(&Record { checksum, body: &body }).expect("it has a JSON form")
}

/// The body of what [`encode`] wrote.
///
/// # Errors
/// See [`NotIt`].
pub(crate) fn open(text: &[u8]) -> Result<&str, NotIt> {
    let record: Record = serde_json::from_slice(text).map_err(NotIt::Json)?;
    let body = record.body.get();
    let found = blake3::hash(body.as_bytes()).to_hex().to_string();
    if found != record.checksum {
        return Err(NotIt::Checksum { found, recorded: record.checksum });
    }
    let plain_bytes = r#"{"checksum":"","body":}"#.len() + record.checksum.len() + body.len();
    if plain_bytes == text.len() { Ok(body) } else { Err(NotIt::ExtraBytes) }
}
