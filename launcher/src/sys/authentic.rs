//! Lines that only the holder of the store's key can have written. Files that are not objects of the store have them, such
//! as the list of files that the job has written: who can write to an encrypted store could otherwise add to that list.

use std::fmt::Write;

/// The key of one file, of [`ckpt_snapshot::JobDir::file_key`]; `None` without encryption, when lines are as they are.
pub type FileKey = Option<[u8; 32]>;

/// Hexadecimal digits of the code after a line, with the space before it.
const CODE_CHARS: usize = 65;

/// The line with its message authentication code (keyed BLAKE3), if there is a key.
#[must_use]
pub fn sealed(key: &FileKey, line: &str) -> String {
    let mut sealed = line.to_owned();
    if let Some(key) = key {
        let _ = write!(sealed, " {}", blake3::keyed_hash(key, line.as_bytes()).to_hex());
    }
    sealed
}

/// The line without its code; `None` if the code is missing or wrong.
#[must_use]
pub fn opened<'a>(key: &FileKey, sealed: &'a [u8]) -> Option<&'a [u8]> {
    let Some(key) = key else { return Some(sealed) };
    let (line, code) = sealed.split_at_checked(sealed.len().checked_sub(CODE_CHARS)?)?;
    let code = blake3::Hash::from_hex(code.strip_prefix(b" ")?).ok()?;
    // The comparison takes the same time wherever they differ.
    (code == blake3::keyed_hash(key, line)).then_some(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_holder_of_the_key_makes_lines() {
        assert_eq!(opened(&None, sealed(&None, "a b").as_bytes()), Some(&b"a b"[..]));
        let (key, other) = (Some([1; 32]), Some([2; 32]));
        let line = sealed(&key, "a b");
        assert_eq!(opened(&key, line.as_bytes()), Some(&b"a b"[..]));
        assert_eq!(opened(&other, line.as_bytes()), None);
        for place in 0..line.len() {
            let mut altered = line.clone().into_bytes();
            altered[place] ^= 1;
            assert_eq!(opened(&key, &altered), None, "{place}");
            assert_eq!(opened(&key, &line.as_bytes()[..place]), None, "{place}");
        }
        assert_eq!(opened(&key, b"a b"), None);
    }
}
