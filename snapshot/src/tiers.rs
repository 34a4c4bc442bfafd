//! A store of several tiers: memory, disk, object store. Each tier that has a snapshot has all of it.
//!
//! Reads use the nearest tier with an intact copy. Writes go to the nearest tier that takes snapshots; [`Tiers::copy`]
//! copies them to the others.

use crate::cancel::Cancellable;
use crate::read_failure::{ReadFailure, classify};
use crate::retention::{History, Retention, choose_prunable};
use crate::store::{Input, Listed, Load, ProgressFn, Reclaimed, SnapshotWriter, Source, Store, damaged};
use crate::{Damage, Manifest, Marks, ReadError, RelPath, SaveError, SnapshotId};
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashSet};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// One of the stores.
#[derive(Debug)]
pub struct Tier {
    name: String,
    store: Box<dyn Store>,
    takes_snapshots: bool,
    /// Cache of the last manifest: a restore reads many small files of one snapshot.
    last: Mutex<Option<Arc<Manifest>>>,
}

impl Tier {
    /// A tier with the display name `name`. If it does not take snapshots, its snapshots are only read and removed.
    #[must_use]
    pub fn new(name: &str, store: Box<dyn Store>, takes_snapshots: bool) -> Self {
        Self { name: name.to_owned(), store, takes_snapshots, last: Mutex::new(None) }
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its store.
    #[must_use]
    pub fn store(&self) -> &dyn Store {
        &*self.store
    }

    /// This tier's own manifest of the snapshot that `manifest` describes.
    fn own(&self, manifest: &Manifest) -> Result<Arc<Manifest>, ReadError> {
        let known = self.last.lock().clone().filter(|last| last.id == manifest.id);
        let own = match known {
            Some(last) => last,
            None => Arc::new(self.store.manifest(&manifest.id)?),
        };
        if !are_copies(manifest, &own) {
            let reason = format!("the copy in {} is a different snapshot of the same name", self.name);
            return Err(damaged(&manifest.id, Damage::Manifest(reason)));
        }
        *self.last.lock() = Some(Arc::clone(&own));
        Ok(own)
    }
}

/// Whether two manifests describe the same snapshot; the chunks may differ.
fn are_copies(one: &Manifest, other: &Manifest) -> bool {
    let files = |manifest: &Manifest| -> BTreeMap<String, u64> {
        manifest.files.iter().map(|file| (file.path.to_string(), file.bytes)).collect()
    };
    one.id == other.id
        && one.job == other.job
        && (one.run, one.taken_unix_ms) == (other.run, other.taken_unix_ms)
        && files(one) == files(other)
}

/// A snapshot in a listing, with the tiers that have it.
#[derive(Debug)]
pub struct PlacedSnapshot {
    /// The manifest from the nearest tier that can read it.
    pub listed: Listed,
    /// The tiers that have the snapshot, nearest first.
    pub tiers: Vec<TierCopy>,
}

/// A copy of a snapshot in a tier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TierCopy {
    /// The tier's name.
    pub tier: String,
    /// Why the tier cannot read its manifest.
    pub unreadable: Option<String>,
}

/// Copying a snapshot failed. The source is unchanged, and the target has no copy.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    /// The caller cancelled the copy.
    #[error("the copy was cancelled")]
    Cancelled,
    /// No such tier.
    #[error("the store has no tier {name:?}; it has {known}")]
    NoTier {
        /// The requested name.
        name: String,
        /// The names of the existing tiers.
        known: String,
    },
    /// The source cannot be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The target cannot be written.
    #[error(transparent)]
    Save(#[from] SaveError),
}

/// A [`Store`] of several, nearest first.
#[derive(Debug)]
pub struct Tiers {
    tiers: Vec<Tier>,
    /// Warnings logged so far, as (snapshot, tier): reading many files of one snapshot logs one warning.
    warned: Mutex<HashSet<(String, String)>>,
    /// Snapshots that are being copied, which must not be pruned.
    copying: Mutex<Vec<SnapshotId>>,
}

impl Tiers {
    /// The store made of `tiers`, nearest first.
    ///
    /// # Panics
    /// If none of them takes snapshots, or two have the same name.
    #[must_use]
    pub fn new(tiers: Vec<Tier>) -> Self {
        assert!(tiers.iter().any(|tier| tier.takes_snapshots), "no tier takes snapshots");
        let names: HashSet<_> = tiers.iter().map(Tier::name).collect();
        assert_eq!(names.len(), tiers.len(), "two tiers have the same name");
        Self { tiers, warned: Mutex::default(), copying: Mutex::default() }
    }

    /// All tiers, nearest first.
    #[must_use]
    pub fn tiers(&self) -> &[Tier] {
        &self.tiers
    }

    /// The tier `name`.
    ///
    /// # Errors
    /// [`CopyError::NoTier`].
    pub fn tier(&self, name: &str) -> Result<&Tier, CopyError> {
        self.tiers.iter().find(|tier| tier.name == name).ok_or_else(|| CopyError::NoTier {
            name: name.to_owned(),
            known: self.tiers.iter().map(Tier::name).collect::<Vec<_>>().join(", "),
        })
    }

    /// All committed snapshots, oldest first, with the tiers that have them. A tier that cannot be read is skipped with
    /// a warning.
    ///
    /// # Errors
    /// If a tier cannot be read and no other tier has a snapshot: an empty list might be wrong.
    pub fn placed(&self) -> Result<Vec<PlacedSnapshot>, ReadError> {
        self.placed_by(|store| store.list())
    }

    fn placed_by(
        &self,
        list: impl Fn(&dyn Store) -> Result<Vec<Listed>, ReadError>,
    ) -> Result<Vec<PlacedSnapshot>, ReadError> {
        let mut found: BTreeMap<SnapshotId, PlacedSnapshot> = BTreeMap::new();
        let mut failure = None;
        for tier in &self.tiers {
            match list(&*tier.store) {
                Ok(listed) => listed.into_iter().for_each(|one| add(&mut found, tier, one)),
                Err(error) => {
                    self.warn_once("", tier, &error, "its snapshots are left out");
                    failure.get_or_insert(error);
                }
            }
        }
        match failure {
            Some(error) if found.is_empty() => Err(error),
            _ => Ok(found.into_values().collect()),
        }
    }

    /// Copies the snapshot `id` from one tier to another. Reads only the chunks that the target lacks; `progress` counts
    /// all bytes. An existing copy is kept, unless its manifest is damaged or data is missing.
    ///
    /// # Errors
    /// See [`CopyError`]. The snapshot is then not visible in `to`.
    pub fn copy(
        &self,
        id: &SnapshotId,
        from: &str,
        to: &str,
        progress: ProgressFn,
        cancel: &AtomicBool,
    ) -> Result<Manifest, CopyError> {
        self.copy_with(id, (from, to), progress, cancel, false)
    }

    /// As [`Self::copy`], with the same manifest: it also says what the snapshot has added to the tier `from`, and its
    /// [`Manifest::content_hash`] is the same.
    ///
    /// # Errors
    /// See [`CopyError`]. The snapshot is then not visible in `to`.
    pub fn replicate(
        &self,
        id: &SnapshotId,
        from: &str,
        to: &str,
        cancel: &AtomicBool,
    ) -> Result<Manifest, CopyError> {
        self.copy_with(id, (from, to), &|_| {}, cancel, true)
    }

    fn copy_with(
        &self,
        id: &SnapshotId,
        (from, to): (&str, &str),
        progress: ProgressFn,
        cancel: &AtomicBool,
        has_same_manifest: bool,
    ) -> Result<Manifest, CopyError> {
        let (from, to) = (self.tier(from)?, self.tier(to)?);
        let _copying = CopyGuard::new(&self.copying, id);
        let manifest = from.store.manifest(id)?;
        let replaces = match to.store.manifest(id) {
            Ok(there) if are_copies(&manifest, &there) => {
                if !to.store.is_lacking(&there)? {
                    return Ok(there);
                }
                // Whoever stored it was killed before it was checked.
                tracing::warn!("{}: {id} lacks data; replacing it with the copy in {}", to.name, from.name);
                true
            }
            Err(ReadError::Missing(_)) => false,
            Ok(_) => return Err(SaveError::Taken(id.to_string()).into()),
            Err(error) if is_certain(&error) => {
                tracing::warn!("{}: {error}; replacing it with the copy in {}", to.name, from.name);
                true
            }
            Err(error) => return Err(error.into()),
        };
        let mut content = manifest.clone();
        content.files.clear();
        if !has_same_manifest {
            (content.stored_bytes, content.changed_bytes) = (None, None);
        }
        transfer(&manifest, (from, to), content, replaces, progress, cancel)
            .map_err(|error| if cancel.load(Ordering::Relaxed) { CopyError::Cancelled } else { error })
    }

    /// Removes the snapshot from the tier `name` only.
    ///
    /// # Errors
    /// If there is no such tier, or a step fails.
    pub fn remove_from(&self, id: &SnapshotId, name: &str) -> Result<(), CopyError> {
        Ok(remove(self.tier(name)?, id)?)
    }

    /// All committed snapshots in the tiers `names`, oldest first, each once, with the manifest of the nearest of these
    /// tiers. Ignores names of missing tiers.
    ///
    /// # Errors
    /// If one of the tiers cannot be read.
    pub fn list_in(&self, names: &[&str]) -> Result<Vec<Listed>, ReadError> {
        self.list_in_by(names, |store| store.list())
    }

    /// As [`Self::list_in`], with [`Store::list_checked`].
    ///
    /// # Errors
    /// If one of the tiers cannot be read.
    pub fn list_checked_in(&self, names: &[&str]) -> Result<Vec<Listed>, ReadError> {
        self.list_in_by(names, |store| store.list_checked())
    }

    fn list_in_by(
        &self,
        names: &[&str],
        list: impl Fn(&dyn Store) -> Result<Vec<Listed>, ReadError>,
    ) -> Result<Vec<Listed>, ReadError> {
        let mut found = BTreeMap::new();
        for tier in self.tiers.iter().filter(|tier| names.contains(&tier.name())) {
            list(&*tier.store)?.into_iter().for_each(|one| add(&mut found, tier, one));
        }
        Ok(found.into_values().map(|placed: PlacedSnapshot| placed.listed).collect())
    }

    /// The snapshots in the tiers `names` that `retention` does not keep, oldest first, except those being copied.
    ///
    /// # Errors
    /// If there is no such tier, or it cannot be read.
    pub fn prunable(
        &self,
        names: &[&str],
        retention: &Retention,
        marks: &Marks,
        history: &History,
    ) -> Result<Vec<SnapshotId>, CopyError> {
        names.iter().try_for_each(|name| self.tier(name).map(drop))?;
        let listed = self.list_checked_in(names)?;
        let mut marks = marks.clone();
        for name in names {
            self.tier(name)?.store.pins()?.keys().for_each(|id| marks.pin(id));
        }
        let mut prunable = choose_prunable(&listed, retention, &marks, history);
        let copying = self.copying.lock();
        prunable.retain(|id| !copying.contains(id));
        Ok(prunable)
    }

    /// The result of `read` with a data file of the snapshot, from the nearest tier where it succeeds. Reads from the file check
    /// the checksums.
    ///
    /// # Errors
    /// [`ReadError::Damaged`] if the file is damaged in each tier that has it.
    pub fn read_source<T>(
        &self,
        manifest: &Manifest,
        path: &RelPath,
        mut read: impl FnMut(&dyn Source) -> io::Result<T>,
    ) -> Result<T, ReadError> {
        let failed = |source: io::Error| match classify(&source) {
            ReadFailure::Access => ReadError::Io { step: "read", path: PathBuf::from(path.as_str()), source },
            _ => damaged(&manifest.id, Damage::Unreadable { path: path.to_string(), source }),
        };
        self.nearest(&manifest.id, |tier| {
            let source = tier.store.source(&*tier.own(manifest)?, path)?;
            read(&*source).map_err(failed)
        })
    }

    /// The result of `read` from the nearest tier where it succeeds. Falls back to the next tier if the snapshot is
    /// damaged or the tier cannot be read, and says so. If there is none, the caller reports the first error.
    fn nearest<'a, T>(
        &'a self,
        id: &SnapshotId,
        mut read: impl FnMut(&'a Tier) -> Result<T, ReadError>,
    ) -> Result<T, ReadError> {
        let mut failed = Vec::new();
        let warn_of = |failed: &[(&Tier, ReadError)], consequence| {
            failed.iter().for_each(|(tier, error)| self.warn_once(&id.to_string(), tier, error, consequence));
        };
        for tier in &self.tiers {
            match read(tier) {
                Ok(found) => {
                    warn_of(&failed, &format!("{} is read instead", tier.name));
                    return Ok(found);
                }
                Err(ReadError::Missing(_)) => {}
                // Another tier cannot help: the manifest is hostile, the target fails, or the key, which all tiers
                // share, is wrong.
                Err(
                    error @ (ReadError::Hostile { .. } | ReadError::Target { .. } | ReadError::Key { .. }),
                ) => {
                    warn_of(&failed, "no other tier is left");
                    return Err(error);
                }
                Err(error) => {
                    tracing::debug!("{}: {error}", tier.name);
                    failed.push((tier, error));
                }
            }
        }
        warn_of(failed.get(1..).unwrap_or_default(), "no other tier is left");
        Err(failed.into_iter().next().map_or_else(|| ReadError::Missing(id.to_string()), |(_, error)| error))
    }

    fn warn_once(&self, id: &str, tier: &Tier, error: &ReadError, consequence: &str) {
        if self.warned.lock().insert((id.to_owned(), tier.name.clone())) {
            tracing::warn!("{}: {error}; {consequence}", tier.name);
        }
    }

    /// Does `work` in every tier, even after a failure, and returns the first failure.
    fn each<T>(&self, work: impl Fn(&Tier) -> Result<T, SaveError>) -> Result<Vec<T>, SaveError> {
        let done: Vec<_> = self.tiers.iter().map(work).collect();
        done.into_iter().collect()
    }
}

/// Whether the error is certain damage.
fn is_certain(error: &ReadError) -> bool {
    matches!(error, ReadError::Damaged { damage, .. } if damage.is_certain())
}

fn add(found: &mut BTreeMap<SnapshotId, PlacedSnapshot>, tier: &Tier, one: Listed) {
    let unreadable = one.manifest.as_ref().err().map(ToString::to_string);
    let place = TierCopy { tier: tier.name.clone(), unreadable };
    match found.get_mut(&one.id) {
        None => {
            found.insert(one.id.clone(), PlacedSnapshot { listed: one, tiers: vec![place] });
        }
        Some(placed) => {
            let is_refused = matches!(placed.listed.manifest, Err(ReadError::Hostile { .. }));
            if placed.listed.manifest.is_err() && one.manifest.is_ok() && !is_refused {
                placed.listed = one;
            }
            placed.tiers.push(place);
        }
    }
}

fn remove(tier: &Tier, id: &SnapshotId) -> Result<(), SaveError> {
    *tier.last.lock() = None;
    match tier.store.manifest(id) {
        Err(ReadError::Missing(_)) => Ok(()),
        Err(error @ ReadError::Io { .. }) => Err(error.into()),
        _ => tier.store.remove(id),
    }
}

/// `content` is the manifest of the copy, without its files. `replaces`: the target has a damaged copy.
fn transfer(
    manifest: &Manifest,
    (from, to): (&Tier, &Tier),
    content: Manifest,
    replaces: bool,
    progress: ProgressFn,
    cancel: &AtomicBool,
) -> Result<Manifest, CopyError> {
    let mut sources = Vec::new();
    for file in &manifest.files {
        if cancel.load(Ordering::Relaxed) {
            return Err(CopyError::Cancelled);
        }
        sources.push(from.store.source(manifest, &file.path)?);
    }
    let sources: Vec<_> = sources.iter().map(|source| Cancellable::new(&**source, cancel)).collect();
    let named = manifest.files.iter().zip(&sources);
    let inputs: Vec<_> = named.map(|(file, from)| Input { path: file.path.clone(), from }).collect();
    let mut writer = to.store.begin(&manifest.id, manifest.data_bytes())?;
    writer.put(&inputs, progress)?;
    if cancel.load(Ordering::Relaxed) {
        return Err(CopyError::Cancelled);
    }
    if replaces {
        // Now that all its data is there.
        remove(to, &manifest.id)?;
    }
    Ok(writer.commit(content)?)
}

/// Protects a snapshot from pruning while it is copied.
struct CopyGuard<'a> {
    all: &'a Mutex<Vec<SnapshotId>>,
    id: SnapshotId,
}

impl<'a> CopyGuard<'a> {
    fn new(all: &'a Mutex<Vec<SnapshotId>>, id: &SnapshotId) -> Self {
        all.lock().push(id.clone());
        Self { all, id: id.clone() }
    }
}

impl Drop for CopyGuard<'_> {
    fn drop(&mut self) {
        let mut all = self.all.lock();
        if let Some(position) = all.iter().position(|id| *id == self.id) {
            all.swap_remove(position);
        }
    }
}

impl Store for Tiers {
    fn begin(&self, id: &SnapshotId, needed_bytes: u64) -> Result<Box<dyn SnapshotWriter + '_>, SaveError> {
        let nearest =
            self.tiers.iter().find(|tier| tier.takes_snapshots).expect("`new` checks that there is one");
        nearest.store.begin(id, needed_bytes)
    }

    fn list(&self) -> Result<Vec<Listed>, ReadError> {
        Ok(self.placed()?.into_iter().map(|placed| placed.listed).collect())
    }

    fn list_checked(&self) -> Result<Vec<Listed>, ReadError> {
        let placed = self.placed_by(|store| {
            store.list_checked().or_else(|error| {
                let listed = store.list()?;
                tracing::warn!("{error}: whether snapshots lack data is not known");
                Ok(listed)
            })
        })?;
        Ok(placed.into_iter().map(|placed| placed.listed).collect())
    }

    fn manifest(&self, id: &SnapshotId) -> Result<Manifest, ReadError> {
        self.nearest(id, |tier| tier.store.manifest(id))
    }

    fn verify(&self, manifest: &Manifest, progress: ProgressFn) -> Result<(), ReadError> {
        self.nearest(&manifest.id, |tier| tier.store.verify(&*tier.own(manifest)?, progress))
    }

    fn load(&self, manifest: &Manifest, wanted: &[Load<'_>], progress: ProgressFn) -> Result<(), ReadError> {
        self.nearest(&manifest.id, |tier| tier.store.load(&*tier.own(manifest)?, wanted, progress))
    }

    /// From the nearest tier that has it. Damage that a later read detects does not fall back to another tier.
    fn source(&self, manifest: &Manifest, path: &RelPath) -> Result<Box<dyn Source + '_>, ReadError> {
        self.nearest(&manifest.id, |tier| tier.store.source(&*tier.own(manifest)?, path))
    }

    /// The nearest tier that has it: that is where it is read.
    fn is_lacking(&self, manifest: &Manifest) -> Result<bool, ReadError> {
        self.nearest(&manifest.id, |tier| tier.store.is_lacking(&*tier.own(manifest)?))
    }

    /// Removes it from all tiers, the farthest first: an interrupted removal leaves the copies that are fast to remove.
    fn remove(&self, id: &SnapshotId) -> Result<(), SaveError> {
        self.tiers.iter().rev().try_for_each(|tier| remove(tier, id))
    }

    fn sweep(&self) -> Result<Vec<String>, SaveError> {
        Ok(self.each(|tier| tier.store.sweep())?.concat())
    }

    fn reclaim_until(&self, cancel: &AtomicBool) -> Result<Reclaimed, SaveError> {
        let done = self.each(|tier| tier.store.reclaim_until(cancel))?;
        Ok(done.into_iter().fold(Reclaimed::default(), |sum, one| Reclaimed {
            freed_bytes: sum.freed_bytes + one.freed_bytes,
            moved_bytes: sum.moved_bytes + one.moved_bytes,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DirStore;
    use crate::chunk::{Chunk, ChunkId};
    use crate::codec::Codec;
    use crate::manifest::tests::sample;
    use crate::store::recorded;
    use parking_lot::Mutex;
    use std::collections::HashMap;
    use std::io;
    use std::ops::Range;
    use std::sync::atomic::AtomicU64;

    /// A store in memory that counts the chunks it reads and can simulate an outage.
    #[derive(Debug, Default)]
    struct MemStore {
        chunks: Mutex<HashMap<ChunkId, Vec<u8>>>,
        manifests: Mutex<BTreeMap<SnapshotId, Manifest>>,
        chunks_read: AtomicU64,
        is_away: AtomicBool,
    }

    impl MemStore {
        fn away(&self) -> Result<(), ReadError> {
            let source = io::Error::from(io::ErrorKind::TimedOut);
            let away = ReadError::Io { step: "reach", path: "mem".into(), source };
            if self.is_away.load(Ordering::Relaxed) { Err(away) } else { Ok(()) }
        }

        fn chunk(&self, chunk: &Chunk) -> io::Result<Vec<u8>> {
            self.chunks_read.fetch_add(1, Ordering::Relaxed);
            let content = self.chunks.lock().get(&chunk.id).cloned().ok_or(io::ErrorKind::NotFound)?;
            if Codec::default().id(&content) == chunk.id {
                Ok(content)
            } else {
                Err(io::ErrorKind::InvalidData.into())
            }
        }

        fn damage_all_chunks(&self) {
            self.chunks.lock().values_mut().for_each(|content| content[0] ^= 1);
        }
    }

    struct MemSource<'a> {
        store: &'a MemStore,
        chunks: Vec<Chunk>,
        bytes: u64,
    }

    impl MemSource<'_> {
        fn at(&self, offset: u64) -> &Chunk {
            let mut end = 0;
            let found = self.chunks.iter().find(|chunk| {
                end += u64::from(chunk.bytes);
                end > offset
            });
            found.unwrap()
        }
    }

    impl Source for MemSource<'_> {
        fn bytes(&self) -> u64 {
            self.bytes
        }

        fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
            into.copy_from_slice(&self.store.chunk(self.at(offset))?);
            Ok(())
        }

        fn chunk_end(&self, offset: u64) -> u64 {
            offset + u64::from(self.at(offset).bytes)
        }

        fn known(&self, range: Range<u64>) -> Option<ChunkId> {
            Some(self.at(range.start).id)
        }
    }

    struct MemWriter<'a>(&'a MemStore, Vec<crate::DataFile>);

    impl SnapshotWriter for MemWriter<'_> {
        fn put(&mut self, files: &[Input<'_>], progress: ProgressFn) -> Result<(), SaveError> {
            for file in files {
                let (mut offset, mut chunks) = (0, Vec::new());
                while offset < file.from.bytes() {
                    // Small chunks, within those of the source.
                    let end = file.from.chunk_end(offset).min(offset + 1000);
                    let known = file.from.known(offset..end);
                    let id = match known.filter(|id| self.0.chunks.lock().contains_key(id)) {
                        Some(id) => id,
                        None => {
                            let mut content = vec![0; usize::try_from(end - offset).unwrap()];
                            let path = file.path.to_string();
                            file.from
                                .read_at(offset, &mut content)
                                .map_err(|source| SaveError::Source { path, source })?;
                            let id = Codec::default().id(&content);
                            self.0.chunks.lock().insert(id, content);
                            id
                        }
                    };
                    chunks.push(Chunk { id, bytes: u32::try_from(end - offset).unwrap() });
                    progress(end - offset);
                    offset = end;
                }
                let (path, bytes) = (file.path.clone(), file.from.bytes());
                self.1.push(crate::DataFile { path, bytes, blake3: None, chunks });
            }
            Ok(())
        }

        fn commit(self: Box<Self>, manifest: Manifest) -> Result<Manifest, SaveError> {
            let manifest = Manifest { files: self.1, ..manifest };
            self.0.manifests.lock().insert(manifest.id.clone(), manifest.clone());
            Ok(manifest)
        }
    }

    impl Store for Arc<MemStore> {
        fn begin(&self, _id: &SnapshotId, _bytes: u64) -> Result<Box<dyn SnapshotWriter + '_>, SaveError> {
            self.away()?;
            Ok(Box::new(MemWriter(self, Vec::new())))
        }

        fn list(&self) -> Result<Vec<Listed>, ReadError> {
            self.away()?;
            let all = self.manifests.lock();
            Ok(all.values().cloned().map(|one| Listed { id: one.id.clone(), manifest: Ok(one) }).collect())
        }

        fn manifest(&self, id: &SnapshotId) -> Result<Manifest, ReadError> {
            self.away()?;
            self.manifests.lock().get(id).cloned().ok_or_else(|| ReadError::Missing(id.to_string()))
        }

        fn verify(&self, manifest: &Manifest, _progress: ProgressFn) -> Result<(), ReadError> {
            manifest.files.iter().try_for_each(|file| {
                let into = Mutex::new(Vec::new());
                self.load(manifest, &[Load { path: &file.path, into: &into }], &|_| {})
            })
        }

        fn load(
            &self,
            manifest: &Manifest,
            wanted: &[Load<'_>],
            progress: ProgressFn,
        ) -> Result<(), ReadError> {
            for one in wanted {
                let file = recorded(manifest, one.path)?;
                let failed = |source| ReadError::Target { path: file.path.to_string(), source };
                one.into.set_bytes(file.bytes).map_err(failed)?;
                let mut offset = 0;
                for chunk in &file.chunks {
                    let unreadable = |source| Damage::Unreadable { path: file.path.to_string(), source };
                    let content =
                        self.chunk(chunk).map_err(|error| damaged(&manifest.id, unreadable(error)))?;
                    one.into.write_at(offset, &content).map_err(failed)?;
                    offset += content.len() as u64;
                    progress(content.len() as u64);
                }
            }
            Ok(())
        }

        fn source(&self, manifest: &Manifest, path: &RelPath) -> Result<Box<dyn Source + '_>, ReadError> {
            let file = recorded(manifest, path)?;
            Ok(Box::new(MemSource { store: self, chunks: file.chunks.clone(), bytes: file.bytes }))
        }

        fn remove(&self, id: &SnapshotId) -> Result<(), SaveError> {
            self.away()?;
            self.manifests.lock().remove(id);
            Ok(())
        }

        fn sweep(&self) -> Result<Vec<String>, SaveError> {
            self.away()?;
            Ok(vec!["mem".to_owned()])
        }

        fn reclaim_until(&self, _cancel: &AtomicBool) -> Result<Reclaimed, SaveError> {
            self.away()?;
            Ok(Reclaimed { freed_bytes: 1, moved_bytes: 2 })
        }
    }

    struct Three {
        near: Arc<MemStore>,
        far: Arc<MemStore>,
        tiers: Tiers,
        dir: tempfile::TempDir,
    }

    /// Memory, a directory of version 1 that takes nothing, and memory again.
    fn three() -> Three {
        let dir = tempfile::tempdir().unwrap();
        let (near, far) = (Arc::<MemStore>::default(), Arc::<MemStore>::default());
        let tiers = Tiers::new(vec![
            Tier::new("near", Box::new(Arc::clone(&near)), true),
            Tier::new("old", Box::new(DirStore::new(dir.path().join("snapshots"))), false),
            Tier::new("far", Box::new(Arc::clone(&far)), true),
        ]);
        Three { near, far, tiers, dir }
    }

    impl Three {
        /// A snapshot as the builds before packed stores wrote it.
        fn save_old(&self, number: u64) -> Manifest {
            let (mut manifest, content) = (sample(number), content(number));
            let file = self.dir.path().join(format!("snapshots/{}/images/a.img", manifest.id));
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(&file, &content).unwrap();
            manifest.files[0].bytes = content.len() as u64;
            manifest.files[0].blake3 = Some(blake3::hash(&content).to_hex().to_string());
            std::fs::write(file.with_file_name("../manifest.json"), manifest.encode()).unwrap();
            manifest
        }
    }

    fn content(number: u64) -> Vec<u8> {
        // 5 chunks, of which the snapshots share the first.
        let mut content = vec![7; 4500];
        content[1000..].fill(u8::try_from(number).unwrap());
        for (index, chunk) in content.chunks_mut(1000).enumerate() {
            chunk[0] = u8::try_from(index).unwrap();
        }
        content
    }

    fn path() -> RelPath {
        RelPath::new("images/a.img").unwrap()
    }

    fn save(store: &dyn Store, number: u64) -> Manifest {
        let manifest = Manifest { files: Vec::new(), ..sample(number) };
        let mut writer = store.begin(&manifest.id, 5000).unwrap();
        let content = content(number);
        writer.put(&[Input { path: path(), from: &content.as_slice() }], &|_| {}).unwrap();
        writer.commit(manifest).unwrap()
    }

    static NOT_CANCELLED: AtomicBool = AtomicBool::new(false);

    #[test]
    fn a_listing_says_where_each_snapshot_is() {
        let three = three();
        save(&three.tiers, 3);
        three.save_old(1);
        save(&three.far, 2);
        save(&three.far, 3);
        let placed = three.tiers.placed().unwrap();
        let found: Vec<_> = placed
            .iter()
            .map(|one| {
                (one.listed.id.sequence(), one.tiers.iter().map(|place| place.tier.as_str()).collect())
            })
            .collect::<Vec<(u64, Vec<&str>)>>();
        assert_eq!(found, [(1, vec!["old"]), (2, vec!["far"]), (3, vec!["near", "far"])]);
    }

    #[test]
    fn a_listing_of_some_tiers_has_each_snapshot_once() {
        let three = three();
        for number in [2, 3] {
            save(&three.near, number);
        }
        three.save_old(1);
        three.save_old(2);
        save(&three.far, 4);
        let near = &sample(2).id;
        three.near.manifests.lock().get_mut(near).unwrap().stall_s = 7.0;
        let listed = three.tiers.list_in(&["near", "old"]).unwrap();
        let numbers: Vec<_> = listed.iter().map(|one| one.id.sequence()).collect();
        assert_eq!(numbers, [1, 2, 3]);
        assert_eq!(listed[1].manifest.as_ref().unwrap().stall_s, 7.0, "as the nearest has it");
        assert!(three.tiers.list_in(&["tape"]).unwrap().is_empty());
        three.far.is_away.store(true, Ordering::Relaxed);
        assert!(
            matches!(three.tiers.list_in(&["near", "far"]), Err(ReadError::Io { .. })),
            "not: there is none"
        );
    }

    #[test]
    fn a_tier_that_is_away_hides_only_what_is_nowhere_else() {
        let three = three();
        three.far.is_away.store(true, Ordering::Relaxed);
        assert!(three.tiers.list().is_err(), "it may have snapshots");
        let saved = save(&three.tiers, 1);
        assert_eq!(three.tiers.list().unwrap().len(), 1);
        assert_eq!(three.tiers.manifest(&saved.id).unwrap(), saved);
        assert!(three.tiers.sweep().is_err());
        three.far.is_away.store(false, Ordering::Relaxed);
        three.near.is_away.store(true, Ordering::Relaxed);
        assert!(matches!(three.tiers.manifest(&saved.id), Err(ReadError::Io { .. })), "not: there is none");
    }

    #[test]
    fn a_damaged_copy_is_replaced_by_the_next_tiers() {
        let three = three();
        let near = save(&three.near, 1);
        let far = save(&three.far, 1);
        let old = three.save_old(1);
        assert_ne!(near.files, old.files, "the old store has other checksums");
        let read = || (&three.tiers as &dyn Store).read(&near, &path());
        assert_eq!(read().unwrap(), content(1));
        three.near.damage_all_chunks();
        assert_eq!(read().unwrap(), content(1), "by way of the old store");
        assert_eq!(three.far.chunks_read.load(Ordering::Relaxed), 0);
        three.tiers.verify(&near, &|_| {}).unwrap();
        std::fs::write(three.dir.path().join(format!("snapshots/{}/images/a.img", near.id)), "x").unwrap();
        assert_eq!(read().unwrap(), content(1));
        assert!(three.far.chunks_read.load(Ordering::Relaxed) > 0);
        three.far.damage_all_chunks();
        assert!(matches!(read(), Err(ReadError::Damaged { .. })));
        assert!(three.tiers.verify(&far, &|_| {}).is_err());
    }

    #[test]
    fn a_target_that_cannot_be_written_is_no_reason_for_another_tier() {
        struct Full;
        impl crate::Target for Full {
            fn set_bytes(&self, _bytes: u64) -> io::Result<()> {
                Ok(())
            }
            fn write_at(&self, _offset: u64, _bytes: &[u8]) -> io::Result<()> {
                Err(io::ErrorKind::StorageFull.into())
            }
        }
        let three = three();
        let saved = save(&three.near, 1);
        save(&three.far, 1);
        let loaded = three.tiers.load(&saved, &[Load { path: &path(), into: &Full }], &|_| {});
        assert!(matches!(loaded, Err(ReadError::Target { .. })), "{loaded:?}");
        assert_eq!(three.far.chunks_read.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn another_snapshot_of_the_same_name_does_not_stand_in() {
        let three = three();
        let near = save(&three.near, 1);
        let other = Manifest { taken_unix_ms: 99, ..save(&three.far, 1) };
        three.far.manifests.lock().insert(near.id.clone(), other);
        three.near.damage_all_chunks();
        let read = (&three.tiers as &dyn Store).read(&near, &path());
        assert!(matches!(read, Err(ReadError::Damaged { .. })), "{read:?}");
        let copied = three.tiers.copy(&near.id, "near", "far", &|_| {}, &NOT_CANCELLED);
        assert!(matches!(copied, Err(CopyError::Save(SaveError::Taken(_)))), "{copied:?}");
    }

    #[test]
    fn a_copy_reads_only_what_the_target_lacks() {
        let three = three();
        let first = save(&three.near, 1);
        let second = save(&three.near, 2);
        let progress_bytes = AtomicU64::new(0);
        let progress = |bytes| {
            progress_bytes.fetch_add(bytes, Ordering::Relaxed);
        };
        three.tiers.copy(&first.id, "near", "far", &progress, &NOT_CANCELLED).unwrap();
        assert_eq!(three.near.chunks_read.load(Ordering::Relaxed), 5);
        let copy = three.tiers.copy(&second.id, "near", "far", &progress, &NOT_CANCELLED).unwrap();
        assert_eq!(three.near.chunks_read.load(Ordering::Relaxed), 9, "the first chunk is the same");
        assert_eq!(progress_bytes.load(Ordering::Relaxed), 9000);
        assert_eq!(copy, second);
        assert_eq!((&three.far as &dyn Store).read(&copy, &path()).unwrap(), content(2));
        three.tiers.copy(&second.id, "near", "far", &progress, &NOT_CANCELLED).unwrap();
        assert_eq!(progress_bytes.load(Ordering::Relaxed), 9000, "it is there already");
    }

    #[test]
    fn snapshots_of_version_1_can_be_copied_unless_they_are_damaged() {
        let three = three();
        let old = three.save_old(1);
        let copy = three.tiers.copy(&old.id, "old", "far", &|_| {}, &NOT_CANCELLED).unwrap();
        assert_eq!((&three.far as &dyn Store).read(&copy, &path()).unwrap(), content(1));
        three.tiers.remove_from(&old.id, "far").unwrap();
        let file = three.dir.path().join(format!("snapshots/{}/images/a.img", old.id));
        let mut damaged = std::fs::read(&file).unwrap();
        damaged[4000] ^= 1;
        std::fs::write(&file, damaged).unwrap();
        assert!(three.tiers.copy(&old.id, "old", "far", &|_| {}, &NOT_CANCELLED).is_err());
        assert!(three.far.list().unwrap().is_empty());
    }

    #[test]
    fn a_damaged_chunk_is_not_copied() {
        let three = three();
        let saved = save(&three.near, 1);
        three.near.damage_all_chunks();
        let copied = three.tiers.copy(&saved.id, "near", "far", &|_| {}, &NOT_CANCELLED);
        assert!(matches!(copied, Err(CopyError::Save(SaveError::Source { .. }))), "{copied:?}");
        assert!(three.far.list().unwrap().is_empty());
    }

    #[test]
    fn a_cancelled_copy_leaves_nothing_to_be_seen() {
        let three = three();
        let saved = save(&three.near, 1);
        let cancel = AtomicBool::new(false);
        let after_two =
            |_| cancel.store(three.near.chunks_read.load(Ordering::Relaxed) >= 2, Ordering::Relaxed);
        let copied = three.tiers.copy(&saved.id, "near", "far", &after_two, &cancel);
        assert!(matches!(copied, Err(CopyError::Cancelled)), "{copied:?}");
        assert_eq!(three.near.chunks_read.load(Ordering::Relaxed), 2);
        assert!(three.far.list().unwrap().is_empty());
    }

    #[test]
    fn a_snapshot_being_copied_is_not_pruned() {
        let three = three();
        for number in 1..=3 {
            save(&three.near, number);
        }
        let (marks, history) = (Marks::default(), History::default());
        let prunable_in = |name| three.tiers.prunable(&[name], &Retention::newest(1), &marks, &history);
        let prunable = || {
            let ids = prunable_in("near").unwrap();
            ids.iter().map(SnapshotId::sequence).collect::<Vec<_>>()
        };
        let seen = Mutex::new(Vec::new());
        let progress = |_| seen.lock().push(prunable());
        three.tiers.copy(&sample(1).id, "near", "far", &progress, &NOT_CANCELLED).unwrap();
        assert!(seen.lock().iter().all(|prunable| *prunable == [2]), "{seen:?}");
        assert_eq!(prunable(), [1, 2]);
        let nowhere = prunable_in("tape").unwrap_err();
        assert!(nowhere.to_string().contains("near, old, far"), "{nowhere}");
    }

    #[test]
    fn removes_from_all_tiers_or_from_one() {
        let three = three();
        save(&three.near, 1);
        save(&three.far, 1);
        let old = three.save_old(1);
        three.tiers.remove_from(&old.id, "old").unwrap();
        three.tiers.remove_from(&old.id, "old").unwrap();
        let tiers = || three.tiers.placed().unwrap().iter().map(|one| one.tiers.len()).sum::<usize>();
        assert_eq!(tiers(), 2);
        three.tiers.remove(&old.id).unwrap();
        assert_eq!(tiers(), 0);
        assert!(matches!(three.tiers.manifest(&old.id), Err(ReadError::Missing(_))));
        assert_eq!(three.tiers.sweep().unwrap(), ["mem", "mem"]);
        assert_eq!(three.tiers.reclaim().unwrap(), Reclaimed { freed_bytes: 2, moved_bytes: 4 });
    }
}
