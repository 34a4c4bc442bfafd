//! Definitions that the codec and the formats of packs and manifests share.

use crate::RelPath;
use std::fmt;

/// The directory of packs and their indexes.
pub(crate) fn packs_dir() -> RelPath {
    RelPath::new("packs").expect("a plain path")
}

/// Why an index, a manifest or a chunk cannot be decoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    /// Written by a newer ckpt-run.
    #[error("it has version {found}, this ckpt-run reads versions up to {known}")]
    Newer {
        /// Its version.
        found: u32,
        /// The newest version that this build reads.
        known: u32,
    },
    /// The encryption key is missing, wrong, or not needed.
    #[error("{0}")]
    Key(&'static str),
    /// The checksum does not match.
    #[error("its checksum does not match")]
    Checksum,
    /// The content breaks a rule of the format.
    #[error("it does not read: {0}")]
    Invalid(&'static str),
}

/// The random name of a pack.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PackId(pub [u8; 16]);

impl PackId {
    /// A new random name.
    ///
    /// # Errors
    /// If the kernel has no random numbers.
    pub fn random() -> std::io::Result<Self> {
        let mut id = [0; 16];
        aws_lc_rs::rand::fill(&mut id).map_err(std::io::Error::other)?;
        Ok(Self(id))
    }

    /// Parses the text form of a [`PackId`].
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let id = Self(u128::from_str_radix(text, 16).ok()?.to_be_bytes());
        // Each name has one spelling: 32 lower-case digits.
        (id.to_string() == text).then_some(id)
    }

    /// The object with the chunks.
    #[must_use]
    pub fn pack(&self) -> RelPath {
        RelPath::new(format!("packs/{self}.pack")).expect("a plain path")
    }

    /// The object with the index.
    #[must_use]
    pub fn index(&self) -> RelPath {
        RelPath::new(format!("packs/{self}.index")).expect("a plain path")
    }
}

impl fmt::Display for PackId {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{:032x}", u128::from_be_bytes(self.0))
    }
}

impl fmt::Debug for PackId {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{self}")
    }
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(*bytes[at..].first_chunk().expect("four bytes"))
}

pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(*bytes[at..].first_chunk().expect("eight bytes"))
}
