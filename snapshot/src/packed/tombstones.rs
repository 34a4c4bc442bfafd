//! Tombstones: the packs that somebody is about to delete from a store that several machines share without a common lock,
//! an object `tombstones/NAME` for each deletion.
//!
//! Whoever deletes packs sets a tombstone first, and then reads the manifests: packs that one of them needs stay. Whoever
//! commits a snapshot writes its manifest first, and then reads the tombstones: a snapshot with a chunk that is only in
//! packs with a tombstone is taken back. So one of the two sees the other, however long either of them stands still, and
//! whatever their clocks say. The same holds for two deletions of the packs with the only two copies of a chunk.
//!
//! Only whoever has set a tombstone knows that it will not delete the packs after all. So nobody else removes it, unless the
//! packs are gone.

use super::PackStore;
use crate::medium::{Medium, read_all};
use crate::pack::{PackId, packs_dir};
use crate::{ReadError, RelPath, SaveError};
use std::collections::HashSet;
use std::io;

/// A longer one is not read (bytes).
const TOMBSTONE_MAX_BYTES: u64 = 16 << 20;

/// The tombstone of packs that this process is about to delete.
#[must_use]
pub struct Tombstone(RelPath);

impl Tombstone {
    /// Sets it.
    ///
    /// # Errors
    /// If it cannot be written: it may exist nevertheless.
    pub fn set(store: &PackStore, packs: &[PackId]) -> Result<Self, SaveError> {
        let one = new_name().map_err(store.failed("write", &dir()))?;
        set(&*store.medium, &one, packs).map_err(store.failed("write", &one))?;
        Ok(Self(one))
    }

    /// Removes it: the packs are deleted, or stay.
    ///
    /// # Errors
    /// If it cannot be removed. The packs are not used for further snapshots then.
    pub fn remove(&self, store: &PackStore) -> Result<(), SaveError> {
        store.medium.remove(&self.0).map_err(store.failed("remove", &self.0))
    }

    fn has(&self, name: &str) -> bool {
        self.0.as_str().ends_with(name)
    }
}

/// The name of a tombstone that is to be set.
///
/// # Errors
/// If the kernel has no random numbers.
pub fn new_name() -> io::Result<RelPath> {
    Ok(name(&PackId::random()?.to_string()))
}

/// Sets the tombstone of packs that are about to be deleted. It is to be removed after them.
///
/// # Errors
/// If it cannot be written: it may exist nevertheless.
pub fn set(medium: &dyn Medium, name: &RelPath, packs: &[PackId]) -> io::Result<()> {
    let lines: String = packs.iter().map(|pack| format!("{pack}\n")).collect();
    medium.put_new(name, lines.as_bytes())
}

/// The packs that are about to be deleted, but for those of this tombstone. Whoever wants to know which packs are left has
/// to list them after this: when they are deleted, so is the tombstone.
///
/// # Errors
/// When a tombstone cannot be read.
pub fn packs(store: &PackStore, own: Option<&Tombstone>) -> Result<HashSet<PackId>, ReadError> {
    let all = read_each(store, |name| !own.is_some_and(|own| own.has(name)))?;
    Ok(all.into_iter().flat_map(|(_, packs)| packs).collect())
}

/// Removes those of which no pack is left: whoever has set them could not. Returns their names.
///
/// # Errors
/// When one cannot be read or removed.
pub fn sweep(store: &PackStore) -> Result<Vec<String>, SaveError> {
    let all = read_each(store, |_| true)?;
    if all.is_empty() {
        return Ok(Vec::new());
    }
    let listed = store.medium.list(&packs_dir()).map_err(store.failed("list", &packs_dir()))?;
    let id = |name: &str| PackId::parse(name.split('.').next()?);
    let left: HashSet<_> = listed.iter().filter_map(|(name, _)| id(name)).collect();
    let mut swept = Vec::new();
    for (name, _) in all.into_iter().filter(|(_, packs)| packs.is_disjoint(&left)) {
        store.medium.remove(&name).map_err(store.failed("remove", &name))?;
        swept.push(name.to_string());
    }
    Ok(swept)
}

/// The tombstones with these names.
fn read_each(
    store: &PackStore,
    is_wanted: impl Fn(&str) -> bool,
) -> Result<Vec<(RelPath, HashSet<PackId>)>, ReadError> {
    let mut found = Vec::new();
    for (one, _) in store.medium.list(&dir()).map_err(store.read_failed(&dir()))? {
        if PackId::parse(&one).is_none() || !is_wanted(&one) {
            continue;
        }
        let name = name(&one);
        match read_all(&*store.medium, &name, TOMBSTONE_MAX_BYTES) {
            Ok(text) => {
                let lines = text.split(|byte| *byte == b'\n').filter_map(|line| str::from_utf8(line).ok());
                found.push((name, lines.filter_map(PackId::parse).collect()));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(store.read_failed(&name)(error)),
        }
    }
    Ok(found)
}

fn dir() -> RelPath {
    RelPath::new("tombstones").expect("a plain path")
}

fn name(one: &str) -> RelPath {
    RelPath::new(format!("{}/{one}", dir())).expect("a plain path")
}
