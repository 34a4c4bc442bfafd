//! Which chunks there are, and where: what the indexes of all packs say.

use crate::chunk::ChunkId;
use crate::codec::Codec;
use crate::medium::{Medium, read_all};
use crate::pack::{Entry, FormatError, INDEX_MAX_BYTES, Index, PACKS, PackId};
use crate::read_failure::{ReadFailure, classify};
use crate::{ReadError, RelPath};
use std::collections::{HashMap, HashSet};
use std::io;

/// Where a chunk lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Location {
    /// In which pack.
    pub pack: PackId,
    /// Where in it, and how.
    pub entry: Entry,
}

/// What the indexes say.
#[derive(Debug, Default)]
pub struct Known {
    chunks: HashMap<ChunkId, Location>,
    /// Further places of chunks that lie in several packs.
    further: HashMap<ChunkId, Vec<Location>>,
    /// Lengths of the packs (bytes).
    packs: HashMap<PackId, u64>,
    /// Indexes that do not read or whose pack is not there, and why.
    pub broken: Vec<(PackId, String)>,
    /// Where a chunk should lie, and something else does, or nobody can tell.
    wrong: Vec<Location>,
}

/// What the indexes say and somebody did not know yet.
#[derive(Debug, Default)]
pub struct News {
    indexes: Vec<Index>,
    /// Packs that are not there any more, or not as long as they were.
    gone: HashSet<PackId>,
    broken: Vec<(PackId, String)>,
}

impl News {
    /// Reads all indexes but those of the packs that are known `before`, with their lengths (bytes): an index never
    /// changes.
    ///
    /// # Errors
    /// When one cannot be read for a reason that is not its own; [`ReadError::Key`] and [`ReadError::NewerObject`] when
    /// that is all that is amiss.
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
        let mut news = Self { gone: before.keys().copied().collect(), ..Self::default() };
        for (name, _) in &listed {
            let Some(pack) = name.strip_suffix(".index").and_then(PackId::parse) else { continue };
            let index = match before.get(&pack) {
                Some(_) => None,
                None => match news.read_one(medium, codec, pack)? {
                    Some(index) => Some(index),
                    None => continue,
                },
            };
            let pack_bytes = before.get(&pack).copied().or(index.as_ref().map(|index| index.pack_bytes));
            if lengths.get(format!("{pack}.pack").as_str()).copied() == pack_bytes {
                news.gone.remove(&pack);
                news.indexes.extend(index);
            } else {
                // Nothing is to be built on a pack that is gone or cut short.
                let reason = "its pack is not there, or is not as long as it was";
                news.is_broken(medium, pack, reason.to_owned());
            }
        }
        Ok(news)
    }

    /// The index of `pack`, unless it is broken or was removed meanwhile.
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
                self.is_broken(medium, pack, error.to_string());
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
                self.is_broken(medium, pack, error.to_string());
                Ok(None)
            }
        }
    }

    fn is_broken(&mut self, medium: &dyn Medium, pack: PackId, reason: String) {
        tracing::warn!("{} does not serve: {reason}", medium.describe(&pack.index()));
        self.broken.push((pack, reason));
    }
}

impl Known {
    /// Takes in what is new. What was added since it was read stays.
    pub fn learn(&mut self, news: News) {
        self.forget_packs(&news.gone);
        news.indexes.iter().for_each(|index| self.add(index));
        self.broken = news.broken;
    }

    /// Adds what `index` says, unless that is known.
    pub fn add(&mut self, index: &Index) {
        if self.packs.insert(index.pack, index.pack_bytes).is_some() {
            return;
        }
        for entry in &index.entries {
            let location = Location { pack: index.pack, entry: *entry };
            match self.chunks.entry(entry.id) {
                std::collections::hash_map::Entry::Vacant(place) => {
                    place.insert(location);
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

    /// Whether the chunk is in a pack, and is so long.
    #[must_use]
    pub fn has_of(&self, id: &ChunkId, bytes: usize) -> bool {
        self.chunks.get(id).is_some_and(|location| location.entry.raw_bytes as usize == bytes)
    }

    /// Everywhere that the chunk lies.
    pub fn locations(&self, id: &ChunkId) -> impl Iterator<Item = &Location> {
        self.chunks.get(id).into_iter().chain(self.further.get(id).into_iter().flatten())
    }

    /// The length of a pack (bytes), as its index says.
    #[must_use]
    pub fn pack_bytes(&self, pack: &PackId) -> Option<u64> {
        self.packs.get(pack).copied()
    }

    /// All packs, with their lengths (bytes).
    pub fn packs(&self) -> &HashMap<PackId, u64> {
        &self.packs
    }

    /// Where chunks should lie, and something else does, or nobody can tell.
    #[must_use]
    pub fn wrong(&self) -> &[Location] {
        &self.wrong
    }

    /// Forgets all that lies in `packs`.
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

    /// What lies there may not be what should: nobody can read it at present.
    pub fn suspect(&mut self, location: &Location) {
        if !self.wrong.contains(location) {
            self.wrong.push(*location);
        }
    }

    /// Forgets where the chunk lies: what lies there is not it.
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
