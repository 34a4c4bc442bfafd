//! Records with a code of the store's key. Who can write to an encrypted store, and does not have the key, can neither
//! make nor alter such a record, nor use it in another place: the code depends on the job, the kind of the record and its
//! number.
//!
//! The body of a record without a code begins with `{"version":1,`. With one, that is
//! `{"version":2,"key":"…","code":"…",`, and the rest is the same. So builds that know no codes refuse the record as one
//! of a newer version. docs/format.md specifies the fields.

use crate::RelPath;
use crate::checked_json::{self, InvalidRecord};
use crate::codec::Key;
use std::fmt;

const PLAIN: &str = r#"{"version":1,"#;
const WITH_KEY: &str = r#"{"version":2,"key":""#;
const WITH_CODE: &str = r#"","code":""#;
const REST: &str = r#"","#;
const NUMBER_CHARS: usize = 16;
const CODE_CHARS: usize = 64;

/// Why an object is not a record of the holder of the key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// It has no code, nor has another record of the job.
    NoCode,
    /// It has no code, while another record of the job has one.
    Planted,
    /// It has a code of another key.
    OtherKey,
    /// Its code does not match.
    WrongCode,
    /// It is not a record at all, for this reason.
    Unreadable(String),
}

impl fmt::Display for Refusal {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        const REMOVE: &str = "Remove the file, after the job has ended: the record before it counts then, or what the snapshots say if there is none. And see who else can write to this store";
        match self {
            Self::NoCode => write!(
                out,
                "it has no code of the key: an older ckpt-run has written it, or somebody who does not have the key. If nobody else can write to this store, `ckpt-run repair --adopt-records` gives the job's records their codes, with --encrypt-key-file and the options of the job (`--job NAME`, `--store`, `--upload`). If not: {REMOVE}"
            ),
            Self::Planted => write!(
                out,
                "it has no code of the key, and other records of the job have one: somebody who does not have the key has written it. {REMOVE}"
            ),
            Self::OtherKey => write!(
                out,
                "it was written with another key. Name the key of this job with --encrypt-key-file. If you are sure that this is its key, somebody who does not have it has written the record. {REMOVE}"
            ),
            Self::WrongCode => write!(
                out,
                "its code does not match: it was altered, or is the record of another job or number. {REMOVE}"
            ),
            Self::Unreadable(why) => write!(out, "{why}. {REMOVE}"),
        }
    }
}

/// A body in its parts.
struct Parts<'a> {
    number: &'a str,
    code: &'a str,
    rest: &'a str,
}

fn parts(body: &str) -> Option<Parts<'_>> {
    let (number, after) = body.strip_prefix(WITH_KEY)?.split_at_checked(NUMBER_CHARS)?;
    let (code, after) = after.strip_prefix(WITH_CODE)?.split_at_checked(CODE_CHARS)?;
    Some(Parts { number, code, rest: after.strip_prefix(REST)? })
}

fn code(key: &Key, job: &str, name: &RelPath, plain: &str) -> blake3::Hash {
    blake3::keyed_hash(&key.of_file(job, name.as_str()), plain.as_bytes())
}

fn number_of(key: &Key) -> String {
    format!("{:016x}", key.number())
}

/// The body with its code, for the record `name` of the job.
///
/// # Panics
/// If it is not of version 1.
pub(crate) fn with_code(key: &Key, job: &str, name: &RelPath, plain: &str) -> String {
    let rest = plain.strip_prefix(PLAIN).expect("version 1 comes first in each record");
    let (number, code) = (number_of(key), code(key, job, name, plain).to_hex());
    [WITH_KEY, &number, WITH_CODE, code.as_str(), REST, rest].concat()
}

/// Whether the body has a code.
pub(crate) fn has_code(body: &str) -> bool {
    parts(body).is_some()
}

/// The body as it is without a code.
pub(crate) fn without_code(body: &str) -> String {
    parts(body).map_or_else(|| body.to_owned(), |parts| [PLAIN, parts.rest].concat())
}

/// Why `text` is not the record `name` of the job, written with this key.
pub(crate) fn refusal(key: &Key, job: &str, name: &RelPath, text: &[u8]) -> Option<Refusal> {
    let body = match checked_json::open(text) {
        Ok(body) => body,
        // Version 1 of the store wrote records without a checksum.
        Err(InvalidRecord::Json(_)) if text.starts_with(b"{") && !name.as_str().contains('/') => {
            return Some(Refusal::NoCode);
        }
        Err(error) => return Some(Refusal::Unreadable(error.to_string())),
    };
    let Some(found) = parts(body) else { return Some(Refusal::NoCode) };
    if found.number != number_of(key) {
        return Some(Refusal::OtherKey);
    }
    let right = code(key, job, name, &[PLAIN, found.rest].concat());
    // The comparison of hashes takes the same time wherever they differ. Each hash has one spelling.
    let is_right = blake3::Hash::from_hex(found.code).is_ok_and(|found| found == right)
        && found.code.bytes().all(|digit| !digit.is_ascii_uppercase());
    (!is_right).then_some(Refusal::WrongCode)
}
