//! Device memory of a restored process that has no mirror: it comes from the store, through a window.
//!
//! ```text
//!   launcher: all of it was read and verified, the processes run ── DeliverWindow ──► agent
//!                 reads the parts from the store, verifies them  ◄── Load ──────────   has put the driver back
//!                                  they are in the window        ── Loaded ────────►   copies them to the device
//! ```
//!
//! The store is read twice. The first time, before any process runs, nothing is kept: it shows damage while an older snapshot
//! can still be resumed as if this one had never been tried. The second time, each chunk is verified again before it reaches
//! the window.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use ckpt_protocol::agent::ToAgent;
use ckpt_protocol::frame::FrameError;
use ckpt_snapshot::chunk::CHUNK_BYTES;
use ckpt_snapshot::{ReadError, Source, faults};
use parking_lot::Mutex;

use super::partial::{StoredContent, pieces};
use super::stream::AgentStream;
use super::window::window_bytes;
use super::{Agents, Shared};
use crate::files::staging;

const BEYOND: &str = "the interposer has requested more than its window has room for. Please report this bug";

/// Threads that read the store for one process.
const LOAD_THREADS: usize = 4;

/// The device memory of a process in a snapshot, and the window through which the process gets it.
#[derive(Debug)]
pub struct Refill {
    /// The number of the process's mirror in the snapshot.
    pub number: u64,
    /// The size of that mirror, bytes.
    pub bytes: u64,
    /// The size of the window, bytes.
    pub window_bytes: u64,
    /// The window.
    pub file: File,
    stored: StoredContent,
    progress: Mutex<Progress>,
}

#[derive(Debug, Default)]
struct Progress {
    is_loading: bool,
    /// When the store has last answered, or was first asked for parts.
    last: Option<Instant>,
}

impl Refill {
    /// The content of a mirror of this number and size, of which `used_bytes` are not zeroes.
    ///
    /// # Errors
    /// The window cannot be created.
    pub fn new(number: u64, bytes: u64, used_bytes: u64, stored: StoredContent) -> io::Result<Self> {
        let file = staging::unnamed_file()?;
        let window_bytes = window_bytes(used_bytes);
        file.set_len(window_bytes)?;
        Ok(Self { number, bytes, window_bytes, file, stored, progress: Mutex::default() })
    }

    /// When the store has last answered, or was first asked for parts; `None` if that has not begun.
    pub(super) fn last_activity(&self) -> Option<Instant> {
        self.progress.lock().last
    }

    fn note(&self, is_loading: bool) {
        *self.progress.lock() = Progress { is_loading, last: Some(Instant::now()) };
    }

    /// Whether its memory is being read.
    pub(super) fn is_loading(&self) -> bool {
        self.progress.lock().is_loading
    }

    /// Reads parts of the content to the window, one after another from `at` on.
    ///
    /// # Errors
    /// The store cannot be read in any tier, or is damaged; or the parts do not fit into the window.
    fn load(&self, ranges: &[Range<u64>], at: u64) -> Result<(), ReadError> {
        let store = &self.stored.store;
        self.note(true);
        let loaded = store.read_source(&self.stored.manifest, &self.stored.path, |source| {
            faults::hit("load")?;
            self.load_from(source, ranges, at)
        });
        self.note(false);
        loaded
    }

    fn load_from(&self, source: &dyn Source, ranges: &[Range<u64>], at: u64) -> io::Result<()> {
        let (mut parts, mut at) = (Vec::new(), at);
        for range in ranges {
            let bytes = range.end.saturating_sub(range.start);
            let end = at.checked_add(bytes).filter(|end| *end <= self.window_bytes);
            let end = end.ok_or_else(|| io::Error::new(ErrorKind::InvalidInput, BEYOND))?;
            parts.extend(pieces(range).map(|piece| (piece.clone(), at + (piece.start - range.start))));
            at = end;
        }
        let next = AtomicUsize::new(0);
        let work = || {
            let mut buffer = vec![0; CHUNK_BYTES];
            while let Some((piece, at)) = parts.get(next.fetch_add(1, Ordering::Relaxed)) {
                let bytes = usize::try_from(piece.end - piece.start).map_err(io::Error::other)?;
                let content = buffer.get_mut(..bytes).ok_or(ErrorKind::InvalidInput)?;
                read_padded(source, piece.start, content)?;
                self.file.write_all_at(content, *at)?;
                self.note(true);
            }
            Ok(())
        };
        thread::scope(|scope| {
            let threads: Vec<_> = (0..LOAD_THREADS.min(parts.len())).map(|_| scope.spawn(work)).collect();
            let results = threads.into_iter().map(|thread| thread.join().expect("no panic in a thread"));
            results.fold(Ok(()), io::Result::and)
        })
    }
}

/// Reads a part of a mirror; what lies behind the stored content is zeroes.
fn read_padded(source: &dyn Source, offset: u64, into: &mut [u8]) -> io::Result<()> {
    let stored_bytes = usize::try_from(source.bytes().saturating_sub(offset)).unwrap_or(usize::MAX);
    let (stored, rest) = into.split_at_mut(stored_bytes.min(into.len()));
    rest.fill(0);
    if stored.is_empty() { Ok(()) } else { source.read_at(offset, stored) }
}

impl Agents {
    /// Takes over the device memory of processes that are about to be restored without a mirror, by their IDs in the job's
    /// PID namespace.
    pub fn adopt_refills(&self, refills: impl IntoIterator<Item = (u32, Arc<Refill>)>) {
        let mut state = self.shared.lock();
        refills.into_iter().for_each(|(pid, refill)| state.holdings.adopt_refill(pid, refill));
    }

    /// Why device memory could not be read from the store for a restored process, if that is why its GPU state was lost.
    pub fn take_read_error(&self) -> Option<ReadError> {
        self.shared.read_error.lock().take()
    }
}

impl Shared {
    /// Loads parts of a restored process's device memory. Once the store could not be read for one process, the resume has
    /// failed for all.
    pub(super) fn load(
        &self,
        stream: &AgentStream,
        pid: u32,
        ranges: &[Range<u64>],
        at: u64,
    ) -> Result<(), FrameError> {
        let refill = self.lock().holdings.refill(pid);
        let failed = self.read_error.lock().as_ref().map(ToString::to_string);
        let problem = match (refill, failed) {
            (Some(refill), None) => refill.load(ranges, at).err().map(|error| {
                let problem = error.to_string();
                self.read_error.lock().get_or_insert(error);
                problem
            }),
            (_, Some(failed)) => Some(failed),
            (None, None) => Some("the launcher has no device memory for this process".to_owned()),
        };
        stream.send(&ToAgent::Loaded { problem })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;
    use std::path::Path;
    use std::time::Duration;

    use ckpt_protocol::agent::{FromAgent, Hello};
    use ckpt_protocol::descriptors;
    use ckpt_snapshot::codec::Codec;
    use ckpt_snapshot::medium::DirMedium;
    use ckpt_snapshot::packed::{Limits, PackStore};
    use ckpt_snapshot::{Input, RelPath, Store, Tier, Tiers};

    use super::super::Quiesced;
    use super::super::tests::{LONG, connect, hello, receive, send, socket_dir};
    use super::*;

    const CHUNK: u64 = CHUNK_BYTES as u64;
    /// Two chunks, and a part of one.
    const STORED: u64 = 2 * CHUNK + 100;

    fn tier(name: &str, dir: &Path) -> Tier {
        let medium = Arc::new(DirMedium::new(dir.to_owned()));
        Tier::new(name, Box::new(PackStore::new(medium, Codec::default(), Limits::default())), true)
    }

    fn content() -> Vec<u8> {
        (0..STORED).map(|at| (at ^ (at >> 8) ^ (at >> 16)) as u8).collect()
    }

    /// A snapshot of a process's memory in two tiers.
    fn stored(near: &Path, far: &Path) -> StoredContent {
        let store = Tiers::new(vec![tier("near", near), tier("far", far)]);
        let path = RelPath::new("gpu/5.mem").expect("a path");
        let manifest = crate::checkpoint::attempt::tests::manifest(Vec::new());
        let mut writer = store.begin(&manifest.id, STORED).expect("begun");
        let content = content();
        writer.put(&[Input { path: path.clone(), from: &content }], &|_| {}).expect("stored");
        let manifest = writer.commit(manifest).expect("committed");
        store.copy(&manifest.id, "near", "far", &|_| {}, &false.into()).expect("copied");
        StoredContent { store: Arc::new(store), manifest: Arc::new(manifest), path }
    }

    fn damage(dir: &Path) {
        for entry in fs::read_dir(dir.join("packs")).expect("packs") {
            let path = entry.expect("an entry").path();
            let bytes = path.metadata().expect("facts").len();
            if bytes > 1 << 20 {
                fs::write(&path, vec![0x5a; usize::try_from(bytes).expect("it fits")]).expect("written");
            }
        }
    }

    fn load(stream: &UnixStream, ranges: &[Range<u64>], at: u64) -> Option<String> {
        send(stream, &FromAgent::Load { ranges: ranges.to_vec(), at });
        let message = receive(stream).expect("an answer");
        let ToAgent::Loaded { problem } = message else { panic!("{message:?}") };
        problem
    }

    #[test]
    fn memory_is_loaded_through_the_window_and_verified() {
        let (near, far) = (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("another"));
        let (_directory, path) = socket_dir();
        let agents = Agents::listen(&path, LONG).expect("listening");
        let refill = Refill::new(7, 64 << 20, 48 << 20, stored(near.path(), far.path())).expect("a window");
        agents.adopt_refills([(5, Arc::new(refill))]);
        let stream = connect(&path);
        let FromAgent::Hello(plain) = hello(5, Some(3)) else { unreachable!("a hello") };
        send(&stream, &FromAgent::Hello(Hello { is_detached: true, supports_loads: true, ..plain }));
        assert!(matches!(receive(&stream), Ok(ToAgent::Welcome { .. })));
        let delivery =
            ToAgent::DeliverWindow { mirror: 7, bytes: 64 << 20, window_bytes: 12 << 20, pairs: Vec::new() };
        assert_eq!(receive(&stream).expect("a message"), delivery);
        let window = descriptors::receive(stream.as_fd(), 1).expect("a file").pop().expect("one");
        let window = File::from(window);

        let (content, mut found) = (content(), vec![1; 10]);
        // The end of a chunk, the beginning of another; and the end of what is stored.
        assert_eq!(load(&stream, &[CHUNK - 3..CHUNK + 4, STORED - 1..STORED + 2], 9), None);
        window.read_exact_at(&mut found, 9).expect("read");
        let at = |offset: u64| content[usize::try_from(offset).expect("it fits")];
        let expected: Vec<u8> = (CHUNK - 3..CHUNK + 4).chain([STORED - 1]).map(at).chain([0, 0]).collect();
        assert_eq!(found, expected);
        // One copy is intact.
        damage(near.path());
        assert_eq!(load(&stream, &[0..CHUNK], 0), None);
        assert!(agents.take_read_error().is_none());
        damage(far.path());
        let problem = load(&stream, &[0..CHUNK], 0).expect("damage");
        assert!(problem.contains("is damaged"), "{problem}");
        // Nothing more is read.
        assert_eq!(load(&stream, &[0..1], 0), Some(problem.clone()));
        send(
            &stream,
            &FromAgent::Reconnected { attempt: 3, restored: true, copied_bytes: 0, lost: Some(problem) },
        );
        assert!(agents.losses.recv_timeout(LONG).expect("a loss").reason.contains("is damaged"));
        assert!(matches!(agents.take_read_error(), Some(ReadError::Damaged { .. })));
        assert!(agents.shared.lock().holdings.refill(5).is_none(), "the window is freed");
    }

    /// Time counts from the last answer of the store.
    #[test]
    fn a_store_that_does_not_answer_fails_the_resume() {
        let (near, far) = (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("another"));
        let (_directory, path) = socket_dir();
        let limit = Duration::from_millis(50);
        let agents = Agents::listen(&path, limit).expect("listening");
        let refill = Refill::new(7, 64 << 20, 48 << 20, stored(near.path(), far.path())).expect("a window");
        let refill = Arc::new(refill);
        let pid = std::process::id();
        agents.adopt_refills([(pid, Arc::clone(&refill))]);
        let expected = || Quiesced::expected(1, [pid], Path::new("/proc"));
        assert_eq!(agents.await_return(&expected(), limit).lost, [], "nothing was asked of the store");
        refill.note(true);
        let asked = Instant::now();
        let summary = agents.await_return(&expected(), limit);
        assert!(asked.elapsed() >= 2 * limit);
        let lost = summary.lost.first().expect("a loss").to_string();
        assert!(lost.contains("the store has not answered for 100ms"), "{lost}");
        refill.note(false);
        assert_eq!(agents.await_return(&expected(), limit).lost, [], "the store has answered");
    }

    #[test]
    fn what_does_not_fit_into_the_window_is_refused() {
        let (near, far) = (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("another"));
        let refill = Refill::new(7, 64 << 20, 1, stored(near.path(), far.path())).expect("a window");
        assert!(refill.load(&[0..CHUNK], 0).is_ok());
        assert!(refill.last_activity().is_some() && !refill.is_loading());
        for (range, at) in [(0..CHUNK, 1), (0..CHUNK + 1, 0), (0..1, u64::MAX), (0..u64::MAX, 0)] {
            assert!(refill.load(std::slice::from_ref(&range), at).is_err(), "{range:?} at {at}");
        }
    }
}
