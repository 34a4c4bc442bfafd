//! Partial mirrors: the store has a part of their content, and that part takes no memory.
//!
//! ```text
//!   capture 7 ──► stored, committed ──► the mirror's memory is freed: its content is the snapshot's
//!   capture 8 ──► writes what has changed: that is in the mirror, the rest in the snapshot
//!      its save reads changed parts from the mirror, and names the chunks of the snapshot for the rest
//!   device memory that was not parked is copied back: the launcher first fills the mirror from the snapshot
//! ```
//!
//! What the mirror has is what captures have written since the commit ([`CaptureHistory`](super::unchanged::CaptureHistory)),
//! not what has memory in its file. So agents report exactly what they have written to a partial mirror.
//!
//! Where that is not known, or the snapshot cannot be read any more, the mirror is replaced before the next capture. The
//! agent copies all device memory to a new mirror.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use ckpt_snapshot::chunk::CHUNK_BYTES;
use ckpt_snapshot::{Manifest, RelPath, SnapshotId, Store, Tiers, size_text};
use parking_lot::MutexGuard;
use rustix::fs::FallocateFlags;
use serde::Deserialize;
use tracing::{info, warn};

use super::mirrors::Mirror;
use super::state::State;
use super::unchanged::Missing;
use super::{Agents, Shared};
use crate::sys::memory;

/// Threads that read the store to fill a mirror.
const FILL_THREADS: usize = 4;

/// What mirrors hold between checkpoints.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MirrorMode {
    /// Decided at the first checkpoint with device memory, by the free host memory.
    #[default]
    Auto,
    /// All device memory.
    All,
    /// What the store does not have: nothing after a successful checkpoint.
    Changed,
    /// Nothing: device memory goes to the store while the job is paused ([`super::window`]), and comes from there in a resume
    /// ([`super::refill`]).
    None,
}

impl MirrorMode {
    /// The choice of [`MirrorMode::Auto`]: `used_bytes` of device memory, `free_bytes` of host memory, of which a checkpoint
    /// takes `image_bytes` for other things.
    fn that_fits(used_bytes: u64, free_bytes: u64, image_bytes: u64) -> Self {
        let all_bytes = used_bytes.saturating_add(image_bytes).saturating_add(memory::SPARE_BYTES);
        match used_bytes {
            _ if used_bytes <= free_bytes / 2 => Self::All,
            // The first checkpoint and a resume need memory for all of it.
            _ if all_bytes <= free_bytes => Self::Changed,
            _ => Self::None,
        }
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::All => "all",
            Self::Changed => "changed",
            Self::None => "none",
        }
    }
}

/// The content of a mirror in a committed snapshot.
#[derive(Debug, Clone)]
pub struct StoredContent {
    /// The store.
    pub store: Arc<Tiers>,
    /// The snapshot.
    pub manifest: Arc<Manifest>,
    /// The data file.
    pub path: RelPath,
}

impl StoredContent {
    /// Reads from the snapshot, and verifies what is read.
    pub fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let source = self.store.source(&self.manifest, &self.path).map_err(io::Error::other)?;
        source.read_at(offset, into)
    }

    fn is_there(&self) -> bool {
        self.store.manifest(&self.manifest.id).is_ok()
            && matches!(self.store.is_lacking(&self.manifest), Ok(false))
    }
}

/// Which snapshots the store has, with all their data: each is looked for once.
#[derive(Default)]
pub struct Present(BTreeMap<SnapshotId, bool>);

impl Present {
    fn has(&mut self, stored: &StoredContent) -> bool {
        *self.0.entry(stored.manifest.id.clone()).or_insert_with(|| stored.is_there())
    }
}

impl Mirror {
    /// Whether its content is complete and what the hashes say: in its memory, or in a snapshot that the store has. `captures` is
    /// the number of the process's last capture.
    pub(crate) fn is_complete(&self, captures: u64, present: &mut Present) -> bool {
        let (is_freed, stored) = {
            let history = self.history.lock();
            if history.is_doubtful() {
                return false;
            }
            (history.is_freed(), history.stored_as_of(captures))
        };
        !is_freed || stored.is_some_and(|stored| present.has(&stored))
    }

    /// Frees its memory, if the content is in a committed snapshot and unchanged since.
    ///
    /// # Errors
    /// When the system fails to free it; the content is then complete nevertheless.
    pub(crate) fn free_stored(&self) -> io::Result<()> {
        let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        if self.window.is_some() {
            return Ok(rustix::fs::fallocate(&*self.file, how, 0, self.file.metadata()?.len())?);
        }
        let mut history = self.history.lock();
        if !self.is_partial || self.bytes == 0 || !history.may_be_freed() {
            return Ok(());
        }
        // Even if this fails, a part may have been freed.
        history.set_freed();
        Ok(rustix::fs::fallocate(&*self.file, how, 0, self.bytes)?)
    }

    /// The same; a failure is logged.
    pub(super) fn free_stored_or_warn(&self) {
        if let Err(error) = self.free_stored() {
            warn!("host memory of a copy of device memory could not be freed: {error}");
        }
    }

    /// Writes the content of ranges to its memory, as far as it was freed and no capture has written it since.
    ///
    /// # Errors
    /// When the store cannot be read, or there is too little host memory.
    pub(crate) fn fill(&self, ranges: Vec<Range<u64>>) -> io::Result<()> {
        let missing = self.history.lock().missing(ranges);
        let Some(Missing { stored, ranges }) = missing.map_err(io::Error::other)? else { return Ok(()) };
        let needed_bytes: u64 = ranges.iter().map(|range| range.end - range.start).sum();
        let available_bytes = memory::available_bytes().unwrap_or(u64::MAX);
        if needed_bytes > available_bytes {
            // Allocating to find out is no option: if memory runs out, the kernel may kill any process.
            return Err(io::Error::other(format!(
                "{} of host memory is needed for that, and {} is free",
                size_text(needed_bytes),
                size_text(available_bytes)
            )));
        }
        let pieces: Vec<_> = ranges.iter().flat_map(pieces).collect();
        let next = AtomicUsize::new(0);
        let work = || {
            let mut buffer = vec![0; CHUNK_BYTES];
            while let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
                let bytes = usize::try_from(piece.end - piece.start).map_err(io::Error::other)?;
                let content = buffer.get_mut(..bytes).ok_or(io::ErrorKind::InvalidData)?;
                stored.read_at(piece.start, content)?;
                self.file.write_all_at(content, piece.start)?;
            }
            Ok(())
        };
        thread::scope(|scope| {
            let threads: Vec<_> = (0..FILL_THREADS).map(|_| scope.spawn(work)).collect();
            let results = threads.into_iter().map(|thread| thread.join().expect("no panic in a thread"));
            results.fold(Ok(()), io::Result::and)
        })
    }
}

/// The parts of a range that lie in one chunk each.
pub(super) fn pieces(range: &Range<u64>) -> impl Iterator<Item = Range<u64>> + use<> {
    let (chunk, end) = (CHUNK_BYTES as u64, range.end);
    let mut start = range.start;
    std::iter::from_fn(move || {
        let piece = start..end.min((start / chunk + 1) * chunk);
        start = piece.end;
        (!piece.is_empty()).then_some(piece)
    })
}

impl Agents {
    /// Sets what mirrors hold between checkpoints. A decision that was made for [`MirrorMode::Auto`] stays. With
    /// [`MirrorMode::None`], mirrors are dropped that were loaded for a resume.
    pub fn set_mirror_mode(&self, mode: MirrorMode) {
        if mode != MirrorMode::Auto {
            *self.shared.mirror_mode.lock() = mode;
        }
        if mode == MirrorMode::None {
            let dropped = self.shared.lock().take_replaced_mirrors();
            drop(dropped);
        }
    }

    /// Frees the memory of partial mirrors whose content has been committed. Returns how much memory mirrors have now.
    ///
    /// A process that is not back yet may be copying from its mirror, which is freed when the process returns. All that
    /// before the next attempt, which waits until all processes are back.
    pub fn free_stored(&self) -> u64 {
        let mut state = self.shared.lock();
        let (back, away): (Vec<_>, Vec<_>) = state
            .holdings
            .mirrors()
            .map(|(pid, mirror)| (pid, mirror.clone()))
            .partition(|(pid, _)| state.is_registered(*pid));
        away.iter().for_each(|(pid, _)| state.holdings.free_on_return(*pid));
        drop(state);
        back.iter().for_each(|(_, mirror)| mirror.free_stored_or_warn());
        let mirrors = back.iter().chain(&away).map(|(_, mirror)| mirror.allocated_bytes());
        mirrors.fold(0, u64::saturating_add)
    }
}

impl Shared {
    /// Frees the mirror of a process that returns after its content was committed. Returns the state, locked: the process
    /// has to be registered before it is unlocked.
    pub(super) fn lock_for_return(&self, pid: u32) -> MutexGuard<'_, State> {
        loop {
            let mut state = self.lock();
            let Some(due) = state.holdings.take_due(pid) else { return state };
            // Freeing takes long.
            drop(state);
            due.free_stored_or_warn();
        }
    }

    /// What mirrors hold between checkpoints, if they take `used_bytes` for all device memory, of which they have
    /// `held_bytes`, and a checkpoint takes `image_bytes` for other things.
    pub(super) fn decide_mirror_mode(
        &self,
        used_bytes: u64,
        held_bytes: u64,
        image_bytes: u64,
    ) -> MirrorMode {
        let mut mode = self.mirror_mode.lock();
        if *mode == MirrorMode::Auto && used_bytes > 0 {
            let free_bytes = memory::available_bytes().unwrap_or(0).saturating_add(held_bytes);
            *mode = MirrorMode::that_fits(used_bytes, free_bytes, image_bytes);
            info!(
                "--mirror {}: a copy of all device memory takes {} of host memory, and {} is free",
                mode.name(),
                size_text(used_bytes),
                size_text(free_bytes)
            );
        }
        *mode
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use ckpt_snapshot::Tier;
    use ckpt_snapshot::codec::Codec;
    use ckpt_snapshot::medium::DirMedium;
    use ckpt_snapshot::packed::{Limits, PackStore};

    /// A snapshot that cannot be read.
    pub fn stored_nowhere() -> StoredContent {
        let medium = Arc::new(DirMedium::new("/nonexistent".into()));
        let store = PackStore::new(medium, Codec::default(), Limits::default());
        StoredContent {
            store: Arc::new(Tiers::new(vec![Tier::new("disk", Box::new(store), true)])),
            manifest: Arc::new(crate::checkpoint::attempt::tests::manifest(Vec::new())),
            path: RelPath::new("gpu/5.mem").expect("a path"),
        }
    }

    #[test]
    fn pieces_lie_in_one_chunk_each() {
        let chunk = CHUNK_BYTES as u64;
        let all = |range: Range<u64>| pieces(&range).collect::<Vec<_>>();
        assert_eq!(all(5..7), [5..7]);
        assert_eq!(all(5..2 * chunk + 1), [5..chunk, chunk..2 * chunk, 2 * chunk..2 * chunk + 1]);
        assert_eq!(all(chunk..2 * chunk), [chunk..2 * chunk]);
        assert_eq!(all(7..7), []);
    }

    #[test]
    fn auto_takes_what_fits() {
        let gib = |gib: u64| gib << 30;
        let mode = |used, free, images| MirrorMode::that_fits(gib(used), gib(free), gib(images));
        assert_eq!(mode(10, 20, 15), MirrorMode::All);
        assert_eq!(mode(10, 19, 8), MirrorMode::Changed);
        assert_eq!(mode(10, 19, 9), MirrorMode::None);
        assert_eq!(mode(10, 5, 0), MirrorMode::None);
    }

    #[test]
    fn modes_have_names() {
        for mode in [MirrorMode::Auto, MirrorMode::All, MirrorMode::Changed, MirrorMode::None] {
            assert_eq!(serde_json::from_value::<MirrorMode>(mode.name().into()).ok(), Some(mode));
        }
    }
}
