//! The trait behind which the snapshots of one job live.

use crate::{Damage, Manifest, ReadError, RelPath, SaveError, SnapshotId};
use std::fs::File;
use std::io::{Read, Write};

/// Told of bytes as they are read or written, from whichever thread does the work.
pub type ProgressFn<'a> = &'a (dyn Fn(u64) + Sync);

/// The snapshots of one job.
///
/// A snapshot exists from the moment its [`SnapshotWriter::commit`] returns; what was begun and not committed is
/// seen by nobody and is removed by [`Store::sweep`].
pub trait Store: Send + Sync {
    /// Begins the snapshot `id`. `needed_bytes` is an estimate of its size: room is checked before anything is
    /// written.
    ///
    /// # Errors
    /// [`SaveError::NoSpace`] when it cannot fit, [`SaveError::Io`] when a step fails.
    fn begin(&self, id: &SnapshotId, needed_bytes: u64) -> Result<Box<dyn SnapshotWriter>, SaveError>;

    /// All committed snapshots, oldest first, damaged ones included.
    ///
    /// # Errors
    /// When the store cannot be read at all.
    fn list(&self) -> Result<Vec<Listed>, ReadError>;

    /// The manifest of `id`, checked against its own checksum.
    ///
    /// # Errors
    /// See [`ReadError`].
    fn manifest(&self, id: &SnapshotId) -> Result<Manifest, ReadError>;

    /// Reads every data file of the snapshot and compares it with its checksum.
    ///
    /// # Errors
    /// The first [`Damage`].
    fn verify(&self, manifest: &Manifest, progress: ProgressFn) -> Result<(), ReadError>;

    /// Makes CRIU's images of the snapshot readable as plain files in one directory.
    ///
    /// # Errors
    /// Damage of anything but the memory: that of processes is checked by [`Images::check`], that of GPUs by
    /// [`Store::read`].
    fn images(&self, manifest: &Manifest) -> Result<Images, ReadError>;

    /// Opens one data file, after checking it.
    ///
    /// # Errors
    /// Damage.
    fn open(&self, manifest: &Manifest, path: &RelPath) -> Result<File, ReadError>;

    /// Copies one data file to `to`, comparing it on the way: what was copied is not to be used before this has
    /// returned without an error.
    ///
    /// # Errors
    /// Damage, and [`ReadError::Io`] when `to` cannot be written.
    fn read(
        &self,
        manifest: &Manifest,
        path: &RelPath,
        to: &mut dyn Write,
        progress: ProgressFn,
    ) -> Result<(), ReadError>;

    /// Removes the snapshot. Another one is never touched; an interruption leaves nothing that `list` shows.
    ///
    /// # Errors
    /// When a step fails.
    fn remove(&self, id: &SnapshotId) -> Result<(), SaveError>;

    /// Removes what interrupted saves and removals left, and returns its names. Call it only under the job's lock.
    ///
    /// # Errors
    /// When a step fails.
    fn sweep(&self) -> Result<Vec<String>, SaveError>;
}

/// One committed snapshot in a listing.
#[derive(Debug)]
pub struct Listed {
    /// Its name.
    pub id: SnapshotId,
    /// What it says, or why that cannot be read.
    pub manifest: Result<Manifest, ReadError>,
}

/// A check that runs while CRIU restores: it compares what was not compared when it was opened.
pub type Check = Box<dyn FnOnce(&(dyn Fn(u64) + Sync)) -> Result<(), ReadError> + Send>;

/// CRIU's images, ready to restore from.
pub struct Images {
    /// The directory that holds them.
    pub dir: File,
    /// Compares the memory pages with their checksums. To be run while CRIU reads them: the job must not go on
    /// before it has returned without an error.
    pub check: Check,
    /// Bytes that `check` reads.
    pub check_bytes: u64,
}

/// A snapshot being written. Dropped without [`SnapshotWriter::commit`], it is removed again.
pub trait SnapshotWriter: Send {
    /// Stores all of `from` as the data file `path`.
    ///
    /// # Errors
    /// When it cannot be written; the writer is then of no more use.
    fn put(&mut self, path: &RelPath, from: &mut dyn Read, progress: ProgressFn) -> Result<(), SaveError>;

    /// Makes everything durable and the snapshot exist. `manifest.files` is filled in from what was `put`.
    ///
    /// # Errors
    /// When a step fails: the snapshot does not exist then.
    fn commit(self: Box<Self>, manifest: Manifest) -> Result<Manifest, SaveError>;
}

impl dyn Store + '_ {
    /// The snapshot that a person means by `text`: a whole ID, its number, or its beginning.
    ///
    /// # Errors
    /// [`ReadError::Missing`] or [`ReadError::Ambiguous`].
    pub fn find(&self, text: &str) -> Result<SnapshotId, ReadError> {
        let mut matching: Vec<_> = self.list()?.into_iter().map(|listed| listed.id).collect();
        matching.retain(|id| id.answers_to(text));
        match &matching[..] {
            [] => Err(ReadError::Missing(text.to_owned())),
            [id] => Ok(id.clone()),
            several => Err(ReadError::Ambiguous {
                text: text.to_owned(),
                candidates: several.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
            }),
        }
    }
}

/// The snapshots to remove so that `keep` sound ones stay, oldest first. Damaged ones do not count as kept; those
/// older than the newest sound one go, newer ones stay for somebody to look at. The last sound one never goes.
#[must_use]
pub fn choose_prunable(listed: &[Listed], keep: usize) -> Vec<SnapshotId> {
    let sound: Vec<_> = listed.iter().filter(|one| one.manifest.is_ok()).map(|one| &one.id).collect();
    let Some(newest) = sound.last() else { return Vec::new() };
    let kept = &sound[sound.len().saturating_sub(keep.max(1))..];
    let goes = |id: &SnapshotId| id < newest && !kept.contains(&id);
    listed.iter().map(|one| &one.id).filter(|id| goes(id)).cloned().collect()
}

pub(crate) fn damaged(id: &SnapshotId, damage: Damage) -> ReadError {
    ReadError::Damaged { id: id.to_string(), damage }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::tests::sample;

    fn listed(states: &[bool]) -> Vec<Listed> {
        let one = |(index, sound): (usize, &bool)| {
            let manifest = sample(index as u64 + 1);
            let id = manifest.id.clone();
            let broken = || damaged(&id, Damage::Manifest("gone".into()));
            Listed { manifest: if *sound { Ok(manifest) } else { Err(broken()) }, id: id.clone() }
        };
        states.iter().enumerate().map(one).collect()
    }

    fn pruned(states: &[bool], keep: usize) -> Vec<u64> {
        choose_prunable(&listed(states), keep).iter().map(SnapshotId::sequence).collect()
    }

    #[test]
    fn keeps_the_newest_sound_ones() {
        assert_eq!(pruned(&[true, true, true, true], 2), [1, 2]);
        assert_eq!(pruned(&[true, true], 3), [0; 0]);
        assert_eq!(pruned(&[true, true, true], 0), [1, 2], "never the last one");
    }

    #[test]
    fn damaged_ones_are_not_counted_as_kept() {
        assert_eq!(pruned(&[true, true, false, true], 2), [1, 3], "the old damaged one goes");
        assert_eq!(pruned(&[true, false], 1), [0; 0], "the sound one stays although a newer exists");
        assert_eq!(pruned(&[false, false], 1), [0; 0]);
    }
}
