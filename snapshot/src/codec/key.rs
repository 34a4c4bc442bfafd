//! The encryption key and the keys derived from it.
//!
//! The cipher is AES-256-GCM. BLAKE3 derives a key for each pack from the pack's random name, and a key for each record
//! from a random salt. The nonce of a chunk is its offset in the pack, which is unique; the key of a record is used
//! once. So no nonce is used twice with the same key, however many snapshots there are.

use crate::format::{FormatError, PackId, u64_at};
use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

const KEY_BYTES: usize = 32;
/// The length of the authentication tag after a ciphertext (bytes).
pub(super) const TAG_BYTES: usize = 16;
/// The length of the salt before an encrypted record (bytes).
pub(super) const SALT_BYTES: usize = 16;

const NAMES: &str = "ckpt-run store 2: names of chunks";
const RECORDS: &str = "ckpt-run store 2: checksums of records";
const NUMBER: &str = "ckpt-run store 2: number of the key";
const PACK: &str = "ckpt-run store 2: chunks of a pack";
const RECORD: &str = "ckpt-run store 2: content of a record";
const FILE: &str = "ckpt-run store 3: lines of a file of a job";

/// The encryption key of a store. Never stored, never printed.
#[derive(Clone)]
pub struct Key([u8; KEY_BYTES]);

/// The key file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// It cannot be read.
    #[error("cannot read the key file {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Other users have access to it.
    #[error("the key file {path} has mode {mode:04o}: other users have access to it. Make it private: chmod 600 {path}", path = path.display())]
    NotPrivate {
        /// The file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// It holds no key.
    #[error("the key file {path} {reason}. It must hold 32 random bytes, or 64 hexadecimal digits; to make one: (umask 077; head -c 32 /dev/urandom > {path})", path = path.display())]
    NoKey {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: &'static str,
    },
}

impl Key {
    /// Reads the key file `path`: 32 bytes, or 64 hexadecimal digits with optional white space around them.
    ///
    /// # Errors
    /// See [`KeyError`].
    pub fn from_file(path: &Path) -> Result<Self, KeyError> {
        let failed = |source| KeyError::Io { path: path.to_owned(), source };
        let file = File::open(path).map_err(failed)?;
        let meta = file.metadata().map_err(failed)?;
        if meta.is_dir() {
            return Err(failed(io::ErrorKind::IsADirectory.into()));
        }
        let mode = meta.permissions().mode() & 0o7777;
        if mode & 0o077 != 0 {
            return Err(KeyError::NotPrivate { path: path.to_owned(), mode });
        }
        let mut content = Vec::new();
        file.take(1024).read_to_end(&mut content).map_err(failed)?;
        Self::parse(&content).map_err(|reason| KeyError::NoKey { path: path.to_owned(), reason })
    }

    fn parse(content: &[u8]) -> Result<Self, &'static str> {
        let key = match <[u8; KEY_BYTES]>::try_from(content) {
            Ok(key) => key,
            Err(_) => match blake3::Hash::from_hex(content.trim_ascii()) {
                Ok(key) => key.into(),
                Err(_) => return Err("does not hold a key"),
            },
        };
        // A file made by `truncate`, or a placeholder.
        if key.iter().all(|&byte| byte == key[0]) { Err("holds one byte value only") } else { Ok(Self(key)) }
    }

    /// A key for a purpose outside of stores; `context` names it, once in the world.
    #[must_use]
    pub fn for_purpose(&self, context: &'static str) -> [u8; KEY_BYTES] {
        self.derive(context, &[])
    }

    /// The number that identifies the key.
    pub(crate) fn number(&self) -> u64 {
        // 0 stands for no key.
        u64_at(&self.derive(NUMBER, &[]), 0).max(1)
    }

    /// The key for the codes of the file `name` of a job: its lines, or the record that it is.
    pub(crate) fn of_file(&self, job: &str, name: &str) -> [u8; KEY_BYTES] {
        self.derive(FILE, format!("{job}/{name}").as_bytes())
    }

    fn derive(&self, context: &str, of: &[u8]) -> [u8; KEY_BYTES] {
        let mut hasher = blake3::Hasher::new_derive_key(context);
        hasher.update(&self.0).update(of);
        *hasher.finalize().as_bytes()
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("Key")
    }
}

/// A key with the derived keys that do not depend on a pack or record.
pub(super) struct Secrets {
    key: Key,
    /// The key for the names of chunks.
    pub(super) names: [u8; KEY_BYTES],
    /// The key for the checksums of records.
    pub(super) records: [u8; KEY_BYTES],
    /// See [`Key::number`].
    pub(super) number: u64,
}

impl Secrets {
    pub(super) fn new(key: &Key) -> Self {
        Self {
            names: key.derive(NAMES, &[]),
            records: key.derive(RECORDS, &[]),
            number: key.number(),
            key: key.clone(),
        }
    }

    /// The cipher for the chunks of `pack`.
    pub(super) fn of_pack(&self, pack: &PackId) -> Cipher {
        Cipher::new(&self.key.derive(PACK, &pack.0))
    }

    /// The cipher for the record that begins with `salt`.
    pub(super) fn of_record(&self, salt: &[u8; SALT_BYTES]) -> Cipher {
        Cipher::new(&self.key.derive(RECORD, salt))
    }
}

impl fmt::Debug for Secrets {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Secrets({:016x})", self.number)
    }
}

/// AES-256-GCM with one key.
pub(super) struct Cipher(LessSafeKey);

impl Cipher {
    fn new(key: &[u8; KEY_BYTES]) -> Self {
        Self(LessSafeKey::new(UnboundKey::new(&AES_256_GCM, key).expect("the key has the right length")))
    }

    /// Encrypts `text` in place and returns the tag. `number` is the nonce: use each number once per key.
    pub(super) fn seal(&self, number: u64, associated: &[u8], text: &mut [u8]) -> [u8; TAG_BYTES] {
        let tag = self.0.seal_in_place_separate_tag(nonce(number), Aad::from(associated), text);
        let tag = tag.expect("texts are shorter than 64 GiB");
        tag.as_ref().try_into().expect("a tag has 16 bytes")
    }

    /// Decrypts `text` to `plain`, which has the same length.
    pub(super) fn open(
        &self,
        number: u64,
        associated: &[u8],
        text: &[u8],
        tag: &[u8; TAG_BYTES],
        plain: &mut [u8],
    ) -> Result<(), FormatError> {
        let opened = self.0.open_separate_gather(nonce(number), Aad::from(associated), text, tag, plain);
        opened.map_err(|_| FormatError::Checksum)
    }
}

fn nonce(number: u64) -> Nonce {
    let mut nonce = [0; NONCE_LEN];
    nonce[..8].copy_from_slice(&number.to_le_bytes());
    Nonce::assume_unique_for_key(nonce)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn key_file(content: &[u8], mode: u32) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        fs::write(&path, content).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        (dir, path)
    }

    #[test]
    fn reads_bytes_and_digits() {
        let bytes: Vec<u8> = (100..132).collect();
        let digits: String = bytes.iter().map(|byte| format!("{byte:02X}")).collect();
        for content in [bytes.clone(), digits.clone().into_bytes(), format!(" {digits}\n").into_bytes()] {
            let (_dir, path) = key_file(&content, 0o600);
            assert_eq!(Key::from_file(&path).unwrap().0[..], bytes);
        }
    }

    #[test]
    fn refuses_invalid_keys() {
        for content in [&b""[..], &[7; 31], &[0; 32], &[b'0'; 64], &[b'x'; 64], &[7; 2000]] {
            let (_dir, path) = key_file(content, 0o600);
            assert!(matches!(Key::from_file(&path), Err(KeyError::NoKey { .. })), "{content:?}");
        }
        // Not even advice that would lock a directory.
        for path in ["/nowhere/key", "/"] {
            assert!(matches!(Key::from_file(Path::new(path)), Err(KeyError::Io { .. })), "{path}");
        }
    }

    #[test]
    fn refuses_a_key_file_with_access_for_others() {
        for mode in [0o604, 0o640, 0o620, 0o644, 0o601] {
            let (_dir, path) = key_file(b"0123456789abcdef0123456789abcdef", mode);
            let error = Key::from_file(&path).unwrap_err();
            assert!(error.to_string().contains("chmod 600"), "{error}");
        }
    }

    #[test]
    fn debug_output_does_not_show_the_key() {
        let key = Key(*b"0123456789abcdef0123456789abcdef");
        assert_eq!(format!("{key:?}"), "Key");
        let shown = format!("{:?}", super::super::Codec::new(super::super::Compression::None, Some(&key)));
        assert!(!shown.contains("48, 49"), "{shown}");
    }
}
