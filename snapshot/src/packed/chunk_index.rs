//! The chunk index: the combined indexes of all packs, in memory.

use crate::chunk::ChunkId;
use crate::codec::Codec;
use crate::medium::{Medium, read_all};
use crate::pack::{Entry, FormatError, INDEX_MAX_BYTES, Index, PackId, packs_dir};
use crate::read_failure::{ReadFailure, classify};
use crate::{DataFile, Manifest, ReadError};
use parking_lot::Mutex;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::io;

/// The location of a copy of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Location {
    /// The pack.
    pub pack: PackId,
    /// The chunk's entry in the pack's index.
    pub entry: Entry,
}

/// The content of all indexes.
#[derive(Debug, Default)]
pub struct ChunkIndex {
    /// The locations of each chunk, at least one.
    chunks: HashMap<ChunkId, Vec<Location>>,
    /// Lengths of the packs (bytes).
    packs: HashMap<PackId, u64>,
    /// Unusable indexes, with the reasons: they are damaged, or their pack is missing.
    pub broken: Vec<(PackId, String)>,
    /// Locations whose content is damaged or cannot be read.
    wrong: Vec<Location>,
}

/// Changes of the indexes since they were last read.
#[derive(Debug, Default)]
pub struct IndexUpdate {
    indexes: Vec<Index>,
    /// Packs that are missing or have another length now.
    missing: HashSet<PackId>,
    broken: Vec<(PackId, String)>,
}

impl IndexUpdate {
    /// Reads all indexes except those of the packs in `before`, a map of packs to their lengths (bytes): an index never
    /// changes.
    ///
    /// # Errors
    /// If the access to an index fails; [`ReadError::Key`] and [`ReadError::NewerObject`] if an index needs another key
    /// or version.
    pub fn read(
        medium: &dyn Medium,
        codec: &Codec,
        before: &HashMap<PackId, u64>,
    ) -> Result<Self, ReadError> {
        let failed =
            |source| ReadError::Io { step: "read", path: medium.describe(&packs_dir()).into(), source };
        let listed = medium.list(&packs_dir()).map_err(failed)?;
        let lengths: HashMap<&str, u64> =
            listed.iter().map(|(name, bytes)| (name.as_str(), *bytes)).collect();
        let mut update = Self { missing: before.keys().copied().collect(), ..Self::default() };
        for (name, _) in &listed {
            let Some(pack) = name.strip_suffix(".index").and_then(PackId::parse) else { continue };
            let (pack_bytes, index) = match before.get(&pack) {
                Some(pack_bytes) => (*pack_bytes, None),
                None => {
                    let mut damage = None;
                    let read = read_index(medium, codec, pack, |reason| damage = Some(reason))?;
                    let index = match damage {
                        Some(reason) => update.copy_of(medium, codec, pack, reason)?,
                        None => read,
                    };
                    let Some(index) = index else { continue };
                    (index.pack_bytes, Some(index))
                }
            };
            if lengths.get(format!("{pack}.pack").as_str()) == Some(&pack_bytes) {
                update.missing.remove(&pack);
                update.indexes.extend(index);
            } else {
                // New snapshots must not refer to a pack that is missing or truncated.
                let reason = "its pack is missing or has another length than recorded";
                update.report_unusable(medium, pack, reason.to_owned());
            }
        }
        Ok(update)
    }

    /// The copy of a damaged index in its pack; `None` if that cannot be used either.
    fn copy_of(
        &mut self,
        medium: &dyn Medium,
        codec: &Codec,
        pack: PackId,
        reason: String,
    ) -> Result<Option<Index>, ReadError> {
        let name = pack.pack();
        match medium.open(&name).and_then(|object| Index::from_tail(&pack, &*object, codec)) {
            Ok(index) => {
                tell_once(pack, || {
                    let name = medium.describe(&pack.index());
                    format!(
                        "the index {name} is damaged ({reason}): its copy in the pack is used. `ckpt-run repair` writes it again"
                    )
                });
                Ok(Some(index))
            }
            Err(source) if classify(&source) == ReadFailure::Access => {
                Err(ReadError::Io { step: "read", path: medium.describe(&name).into(), source })
            }
            Err(_) => {
                self.report_unusable(medium, pack, reason);
                Ok(None)
            }
        }
    }

    fn report_unusable(&mut self, medium: &dyn Medium, pack: PackId, reason: String) {
        tell_once(pack, || format!("the index {} is unusable: {reason}", medium.describe(&pack.index())));
        self.broken.push((pack, reason));
    }
}

/// Warns of an index: a process reads each again and again.
fn tell_once(pack: PackId, what: impl FnOnce() -> String) {
    static TOLD: Mutex<BTreeSet<PackId>> = Mutex::new(BTreeSet::new());
    if TOLD.lock().insert(pack) {
        tracing::warn!("{}", what());
    }
}

/// The index of `pack`, unless it was removed concurrently. Calls `report` with the reason if it is unusable.
///
/// # Errors
/// As [`IndexUpdate::read`].
pub fn read_index(
    medium: &dyn Medium,
    codec: &Codec,
    pack: PackId,
    report: impl FnOnce(String),
) -> Result<Option<Index>, ReadError> {
    let what = || medium.describe(&pack.index());
    let bytes = match read_all(medium, &pack.index(), INDEX_MAX_BYTES) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) if classify(&source) == ReadFailure::Access => {
            return Err(ReadError::Io { step: "read", path: what().into(), source });
        }
        Err(error) => {
            report(error.to_string());
            return Ok(None);
        }
    };
    // What looks like another key or version may be damage: the copy in the pack tells.
    let has_copy = || {
        let copy = medium.open(&pack.pack()).and_then(|object| Index::from_tail(&pack, &*object, codec));
        copy.is_ok()
    };
    match Index::decode(&pack, &bytes, codec) {
        Ok(index) => Ok(Some(index)),
        Err(error @ (FormatError::Key(_) | FormatError::Newer { .. })) if has_copy() => {
            report(error.to_string());
            Ok(None)
        }
        Err(FormatError::Key(reason)) => Err(ReadError::Key { what: what(), reason }),
        Err(FormatError::Newer { found, known }) => {
            Err(ReadError::NewerObject { what: what(), found, known })
        }
        Err(error) => {
            report(error.to_string());
            Ok(None)
        }
    }
}

impl ChunkIndex {
    /// Applies an update. Packs that were added since the update was read are kept.
    pub fn apply(&mut self, update: IndexUpdate) {
        self.forget_packs(&update.missing);
        update.indexes.iter().for_each(|index| self.add(index));
        self.broken = update.broken;
    }

    /// Adds the entries of `index`, unless its pack was added before.
    pub fn add(&mut self, index: &Index) {
        if self.packs.insert(index.pack, index.pack_bytes).is_some() {
            return;
        }
        for entry in &index.entries {
            // Almost all chunks have one location.
            let locations = self.chunks.entry(entry.id).or_insert_with(|| Vec::with_capacity(1));
            locations.push(Location { pack: index.pack, entry: *entry });
        }
    }

    /// Whether the chunk is in a pack that is not one of these.
    #[must_use]
    pub fn has_outside(&self, id: &ChunkId, packs: &HashSet<PackId>) -> bool {
        self.locations(id).iter().any(|location| !packs.contains(&location.pack))
    }

    /// The data files of a snapshot with a chunk that no pack has but these, once for each such chunk.
    pub fn lacking<'a>(
        &'a self,
        manifest: &'a Manifest,
        packs: &'a HashSet<PackId>,
    ) -> impl Iterator<Item = &'a DataFile> {
        let is_lacking = |id: &ChunkId| !id.is_zeroes() && !self.has_outside(id, packs);
        let each = manifest.files.iter().flat_map(|file| file.chunks.iter().map(move |chunk| (file, chunk)));
        each.filter(move |(_, chunk)| is_lacking(&chunk.id)).map(|(file, _)| file)
    }

    /// Whether the chunk has this length.
    #[must_use]
    pub fn is_of(&self, id: &ChunkId, bytes: usize) -> bool {
        self.locations(id).first().is_some_and(|location| location.entry.raw_bytes as usize == bytes)
    }

    /// All locations of the chunk.
    #[must_use]
    pub fn locations(&self, id: &ChunkId) -> &[Location] {
        self.chunks.get(id).map_or(&[], Vec::as_slice)
    }

    /// The length of a pack according to its index (bytes).
    #[must_use]
    pub fn pack_bytes(&self, pack: &PackId) -> Option<u64> {
        self.packs.get(pack).copied()
    }

    /// All packs, with their lengths (bytes).
    pub fn packs(&self) -> &HashMap<PackId, u64> {
        &self.packs
    }

    /// Locations whose content is damaged or cannot be read.
    #[must_use]
    pub fn wrong(&self) -> &[Location] {
        &self.wrong
    }

    /// Removes all entries of `packs`.
    pub fn forget_packs(&mut self, packs: &HashSet<PackId>) {
        if packs.is_empty() {
            return;
        }
        let stays = |location: &Location| !packs.contains(&location.pack);
        self.chunks.retain(|_, locations| {
            locations.retain(stays);
            !locations.is_empty()
        });
        self.packs.retain(|pack, _| !packs.contains(pack));
        self.wrong.retain(stays);
    }

    /// Notes that the content at `location` cannot be read and may be damaged.
    pub fn suspect(&mut self, location: &Location) {
        if self.packs.contains_key(&location.pack) && !self.wrong.contains(location) {
            self.wrong.push(*location);
        }
    }

    /// Removes a location of the chunk whose content is damaged.
    pub fn forget(&mut self, id: &ChunkId, wrong: &Location) {
        let Some(locations) = self.chunks.get_mut(id) else { return };
        let before = locations.len();
        locations.retain(|one| one != wrong);
        if locations.len() < before {
            self.suspect(wrong);
        }
        if self.locations(id).is_empty() {
            self.chunks.remove(id);
        }
    }
}
