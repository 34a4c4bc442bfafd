//! The chunk index: the combined indexes of all packs, in memory.

use crate::chunk::ChunkId;
use crate::codec::Codec;
use crate::medium::{Medium, read_all};
use crate::pack::{Entry, FormatError, INDEX_MAX_BYTES, Index, PACKS, PackId};
use crate::read_failure::{ReadFailure, classify};
use crate::{ReadError, RelPath};
use std::collections::{HashMap, HashSet};
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
    chunks: HashMap<ChunkId, Location>,
    /// Additional locations of chunks that are in several packs.
    further: HashMap<ChunkId, Vec<Location>>,
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
        let dir = RelPath::new(PACKS).expect("a plain path");
        let failed = |source| ReadError::Io { step: "read", path: medium.describe(&dir).into(), source };
        let listed = medium.list(&dir).map_err(failed)?;
        let lengths: HashMap<&str, u64> =
            listed.iter().map(|(name, bytes)| (name.as_str(), *bytes)).collect();
        let mut update = Self { missing: before.keys().copied().collect(), ..Self::default() };
        for (name, _) in &listed {
            let Some(pack) = name.strip_suffix(".index").and_then(PackId::parse) else { continue };
            let index = match before.get(&pack) {
                Some(_) => None,
                None => match update.read_one(medium, codec, pack)? {
                    Some(index) => Some(index),
                    None => continue,
                },
            };
            let pack_bytes = before.get(&pack).copied().or(index.as_ref().map(|index| index.pack_bytes));
            if lengths.get(format!("{pack}.pack").as_str()).copied() == pack_bytes {
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

    /// The index of `pack`, unless it is unusable or was removed concurrently.
    fn read_one(
        &mut self,
        medium: &dyn Medium,
        codec: &Codec,
        pack: PackId,
    ) -> Result<Option<Index>, ReadError> {
        let what = || medium.describe(&pack.index());
        let bytes = match read_all(medium, &pack.index(), INDEX_MAX_BYTES) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) if classify(&source) == ReadFailure::Access => {
                return Err(ReadError::Io { step: "read", path: what().into(), source });
            }
            Err(error) => {
                self.report_unusable(medium, pack, error.to_string());
                return Ok(None);
            }
        };
        match Index::decode(&pack, &bytes, codec) {
            Ok(index) => Ok(Some(index)),
            Err(FormatError::Key(reason)) => Err(ReadError::Key { what: what(), reason }),
            Err(FormatError::Newer { found, known }) => {
                Err(ReadError::NewerObject { what: what(), found, known })
            }
            Err(error) => {
                self.report_unusable(medium, pack, error.to_string());
                Ok(None)
            }
        }
    }

    fn report_unusable(&mut self, medium: &dyn Medium, pack: PackId, reason: String) {
        tracing::warn!("the index {} is unusable: {reason}", medium.describe(&pack.index()));
        self.broken.push((pack, reason));
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
            let location = Location { pack: index.pack, entry: *entry };
            match self.chunks.entry(entry.id) {
                std::collections::hash_map::Entry::Vacant(slot) => {
                    slot.insert(location);
                }
                std::collections::hash_map::Entry::Occupied(_) => {
                    self.further.entry(entry.id).or_default().push(location);
                }
            }
        }
    }

    /// Whether the chunk is in a pack.
    #[must_use]
    pub fn has(&self, id: &ChunkId) -> bool {
        self.chunks.contains_key(id)
    }

    /// Whether the chunk is in a pack with this length.
    #[must_use]
    pub fn has_of(&self, id: &ChunkId, bytes: usize) -> bool {
        self.chunks.get(id).is_some_and(|location| location.entry.raw_bytes as usize == bytes)
    }

    /// All locations of the chunk.
    pub fn locations(&self, id: &ChunkId) -> impl Iterator<Item = &Location> {
        self.chunks.get(id).into_iter().chain(self.further.get(id).into_iter().flatten())
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
        self.further.retain(|_, locations| {
            locations.retain(stays);
            !locations.is_empty()
        });
        let further = &mut self.further;
        self.chunks.retain(|id, location| {
            if stays(location) {
                return true;
            }
            let Some(mut others) = further.remove(id) else { return false };
            *location = others.remove(0);
            if !others.is_empty() {
                further.insert(*id, others);
            }
            true
        });
        self.packs.retain(|pack, _| !packs.contains(pack));
        self.wrong.retain(stays);
    }

    /// Notes that the content at `location` cannot be read and may be damaged.
    pub fn suspect(&mut self, location: &Location) {
        if !self.wrong.contains(location) {
            self.wrong.push(*location);
        }
    }

    /// Removes a location of the chunk whose content is damaged.
    pub fn forget(&mut self, id: &ChunkId, wrong: &Location) {
        if self.locations(id).any(|one| one == wrong) {
            self.suspect(wrong);
        }
        let mut left: Vec<Location> = self.locations(id).filter(|one| *one != wrong).copied().collect();
        self.further.remove(id);
        match left.pop() {
            Some(first) => {
                self.chunks.insert(*id, first);
                if !left.is_empty() {
                    self.further.insert(*id, left);
                }
            }
            None => {
                self.chunks.remove(id);
            }
        }
    }
}
