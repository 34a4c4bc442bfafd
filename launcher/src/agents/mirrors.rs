//! Memory that the launcher holds for processes with device memory: mirrors.
//!
//! A mirror holds the content of a process's device memory as of the last capture. A process identifies that content by
//! the number of the mirror, so a number is never reused for other content, not even by another launcher. It belongs to one
//! process, and is freed when the process exits or executes another program.

use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::time::Instant;

use ckpt_protocol::agent::Capture;
use rustix::fs::{FallocateFlags, SeekFrom};
use rustix::io::Errno;

use super::process::ProcessHandle;
use super::refill::Refill;
use super::unchanged::CaptureHistory;
use super::window::{Window, window_bytes};
use crate::files::staging;

/// Sizes are multiples of this: huge pages.
const HUGE_PAGE_BYTES: u64 = 2 << 20;
/// Memory is allocated in steps of this size, because a signal can make the kernel restart a step.
const STEP_BYTES: u64 = 1 << 30;
/// Numbers are below this, so that every JSON parser reads them exactly.
const NUMBER_LIMIT: u64 = 1 << 53;

/// Memory of the launcher that holds the content of a process's device memory.
#[derive(Debug, Clone)]
pub struct Mirror {
    /// Identifies the mirror. Never 0.
    pub number: u64,
    /// Its size.
    pub bytes: u64,
    /// Its memory.
    pub file: Arc<File>,
    /// Whether its agent allocates the memory, and leaves holes for chunks of zeroes. Older agents pin all of it.
    pub has_holes: bool,
    /// Whether its memory is freed where the store has the content, see [`super::partial`].
    pub is_partial: bool,
    /// The file is a window through which the memory is read: there is no mirror, but its size and number.
    pub window: Option<Arc<Window>>,
    /// The captures since the last commit: which parts of the content the store has. Shared by all sizes of the mirror,
    /// like the memory.
    pub history: Arc<Mutex<CaptureHistory>>,
}

impl Mirror {
    /// A mirror without content, for a process that has none.
    ///
    /// # Errors
    /// When the memory cannot be allocated.
    pub fn new(bytes: u64) -> io::Result<Self> {
        Self::with_holes(0).and_then(|mirror| Self { has_holes: false, ..mirror }.resized(bytes))
    }

    /// The same, in which the agent allocates the memory.
    ///
    /// # Errors
    /// When the file cannot be created.
    pub fn with_holes(bytes: u64) -> io::Result<Self> {
        let file = Arc::new(staging::unnamed_file()?);
        let number = random_number()?;
        let history = Arc::default();
        Self { number, bytes: 0, file, has_holes: true, is_partial: false, window: None, history }
            .resized(bytes)
    }

    /// A window, instead of a mirror of this size.
    ///
    /// # Errors
    /// When the file cannot be created.
    pub fn without_content(bytes: u64) -> io::Result<Self> {
        let mirror = Self::with_holes(0)?;
        Self { window: Some(Arc::default()), ..mirror }.resized(bytes)
    }

    /// A mirror whose content will be loaded from a snapshot. It has its size, but no memory yet.
    ///
    /// # Errors
    /// When the file cannot be created.
    pub fn to_be_filled(number: u64, bytes: u64, has_holes: bool) -> io::Result<Self> {
        let file = staging::unnamed_file()?;
        file.set_len(bytes)?;
        let file = Arc::new(file);
        let history = Arc::default();
        Ok(Self { number, bytes, file, has_holes, is_partial: false, window: None, history })
    }

    /// How much memory it has.
    pub fn allocated_bytes(&self) -> u64 {
        self.file.metadata().map_or(self.bytes, |file| file.blocks().saturating_mul(512))
    }

    /// The ranges that are not holes, in order.
    ///
    /// # Errors
    /// When the system does not tell.
    pub fn data(&self) -> io::Result<Vec<Range<u64>>> {
        let (mut data, mut offset) = (Vec::new(), 0);
        while offset < self.bytes {
            let start = match rustix::fs::seek(&*self.file, SeekFrom::Data(offset)) {
                Ok(start) => start,
                // There is nothing behind.
                Err(Errno::NXIO) => break,
                Err(error) => return Err(error.into()),
            };
            offset = rustix::fs::seek(&*self.file, SeekFrom::Hole(start))?;
            data.push(start..offset.min(self.bytes));
        }
        Ok(data)
    }

    /// Records a capture, or that the agent reported none. The written ranges are moved to the history.
    pub fn record_capture(&self, capture: Option<&mut Capture>) {
        let mut own = capture.filter(|capture| capture.mirror == self.number);
        if self.window.is_some() {
            // It was recorded before the memory was read.
            let mut history = self.history.lock();
            if !own.is_some_and(|capture| history.is_newest(capture.number)) {
                history.record_capture(None);
            }
            return;
        }
        self.history.lock().record_capture(own.as_deref());
        if let Some(capture) = &mut own {
            capture.written = Vec::new();
        }
    }

    /// The size of a mirror with room for `needed_bytes`. A mirror shrinks only when that frees at least half of it.
    pub fn bytes_for(needed_bytes: u64, present_bytes: u64) -> u64 {
        let wanted_bytes = needed_bytes.checked_next_multiple_of(HUGE_PAGE_BYTES).unwrap_or(u64::MAX);
        if (present_bytes / 2..present_bytes).contains(&wanted_bytes) { present_bytes } else { wanted_bytes }
    }

    /// The same mirror in another size. Its memory is allocated now, not on first write, unless the agent does that.
    ///
    /// # Errors
    /// When there is not enough memory; the mirror then keeps its size.
    pub fn resized(&self, bytes: u64) -> io::Result<Self> {
        if self.window.is_some() {
            if bytes < self.bytes {
                *self.history.lock() = CaptureHistory::default();
            }
            self.file.set_len(window_bytes(bytes).max(self.file.metadata()?.len()))?;
            return Ok(Self { bytes, ..self.clone() });
        }
        if bytes < self.bytes {
            let mut history = self.history.lock();
            // What was freed is in the store only.
            if !history.is_freed() {
                *history = CaptureHistory::default();
            }
            self.file.set_len(bytes)?;
        }
        if self.has_holes {
            self.file.set_len(bytes)?;
            return Ok(Self { bytes, ..self.clone() });
        }
        let mut allocated_bytes = self.bytes;
        while allocated_bytes < bytes {
            let step_bytes = STEP_BYTES.min(bytes - allocated_bytes);
            let allocated = rustix::io::retry_on_intr(|| {
                rustix::fs::fallocate(&*self.file, FallocateFlags::empty(), allocated_bytes, step_bytes)
            });
            if let Err(error) = allocated {
                // Frees what was allocated so far.
                self.file.set_len(self.bytes)?;
                return Err(error.into());
            }
            allocated_bytes += step_bytes;
        }
        Ok(Self { bytes, ..self.clone() })
    }
}

pub(super) fn random_number() -> io::Result<u64> {
    let mut bytes = [0; 8];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok((u64::from_le_bytes(bytes) % NUMBER_LIMIT).max(1))
}

/// Memory that is held for one process.
#[derive(Debug, Default)]
pub struct Held {
    /// `None` while the process is being restored.
    handle: Option<Arc<ProcessHandle>>,
    mirror: Option<Mirror>,
    /// Instead of a mirror, while the process is being restored.
    refill: Option<Arc<Refill>>,
    /// The mirror is to be freed when the process is back.
    is_due: bool,
}

/// Memory that is held for all processes of a job, by their IDs in the job's PID namespace.
///
/// Freeing the memory that methods return can take long: drop it without holding a lock.
#[derive(Debug, Default)]
pub struct Holdings {
    processes: BTreeMap<u32, Held>,
}

impl Holdings {
    /// Whether the process has device memory, as far as that is known since the last checkpoint or resume.
    pub fn has(&self, pid: u32) -> bool {
        self.processes.contains_key(&pid)
    }

    pub fn mirror(&self, pid: u32) -> Option<&Mirror> {
        self.processes.get(&pid)?.mirror.as_ref()
    }

    /// All mirrors, with the IDs of their processes.
    pub fn mirrors(&self) -> impl Iterator<Item = (u32, &Mirror)> {
        self.processes.iter().filter_map(|(&pid, held)| Some((pid, held.mirror.as_ref()?)))
    }

    /// The content of this process's mirror was committed while the process was away.
    pub fn free_on_return(&mut self, pid: u32) {
        if let Some(held) = self.processes.get_mut(&pid) {
            held.is_due = true;
        }
    }

    /// The mirror that is to be freed before this process is registered, once.
    pub fn take_due(&mut self, pid: u32) -> Option<Mirror> {
        let held = self.processes.get_mut(&pid)?;
        held.mirror.clone().filter(|_| std::mem::take(&mut held.is_due))
    }

    /// Replaces the mirror of a process; returns the old one.
    #[must_use]
    pub fn set_mirror(
        &mut self,
        pid: u32,
        handle: &Arc<ProcessHandle>,
        mirror: Option<Mirror>,
    ) -> Option<Mirror> {
        let held = self.processes.entry(pid).or_default();
        held.handle = Some(Arc::clone(handle));
        held.is_due = false;
        std::mem::replace(&mut held.mirror, mirror)
    }

    /// Has the mirror of a process replaced before the next capture, which then copies everything.
    pub fn distrust_mirror(&self, pid: u32) {
        if let Some(mirror) = self.mirror(pid) {
            mirror.history.lock().set_doubtful();
        }
    }

    /// Adds the mirror of a process that is being restored.
    pub fn adopt(&mut self, pid: u32, mirror: Mirror) {
        self.processes.insert(pid, Held { mirror: Some(mirror), ..Held::default() });
    }

    /// Adds the device memory of a process that is being restored without a mirror.
    pub fn adopt_refill(&mut self, pid: u32, refill: Arc<Refill>) {
        self.processes.insert(pid, Held { refill: Some(refill), ..Held::default() });
    }

    pub fn refill(&self, pid: u32) -> Option<Arc<Refill>> {
        self.processes.get(&pid)?.refill.clone()
    }

    /// Removes what a process was restored from, which has returned.
    #[must_use]
    pub fn take_refill(&mut self, pid: u32) -> Option<Arc<Refill>> {
        self.processes.get_mut(&pid)?.refill.take()
    }

    /// When device memory was last loaded from the store for a process that is being restored, and whether some is being
    /// loaded now.
    pub fn last_load(&self) -> Option<(Instant, bool)> {
        let refills = || self.processes.values().filter_map(|held| held.refill.as_ref());
        let last = refills().filter_map(|refill| refill.last_activity()).max()?;
        Some((last, refills().any(|refill| refill.is_loading())))
    }

    /// Sets the handle of a process that has returned.
    pub fn set_handle(&mut self, pid: u32, handle: &Arc<ProcessHandle>) {
        if let Some(held) = self.processes.get_mut(&pid) {
            held.handle = Some(Arc::clone(handle));
        }
    }

    /// Removes everything held for a process that has restarted.
    #[must_use]
    pub fn forget(&mut self, pid: u32) -> Option<Held> {
        self.processes.remove(&pid)
    }

    /// Removes what is held for processes that have exited or executed another program.
    #[must_use]
    pub fn remove_ended(&mut self) -> Vec<Held> {
        self.remove_if(|_, held| held.handle.as_ref().is_some_and(|handle| handle.has_ended()))
    }

    /// Removes what is held for processes that were to be restored and have no handle.
    #[must_use]
    pub fn remove_unexpected<'a>(
        &mut self,
        handles: impl Fn(u32) -> Option<&'a Arc<ProcessHandle>>,
    ) -> Vec<Held> {
        self.remove_if(|pid, held| {
            held.handle = held.handle.take().or_else(|| handles(pid).cloned());
            held.handle.is_none()
        })
    }

    fn remove_if(&mut self, mut matches: impl FnMut(u32, &mut Held) -> bool) -> Vec<Held> {
        let matching = self.processes.iter_mut().filter_map(|(&pid, held)| matches(pid, held).then_some(pid));
        let matching: Vec<_> = matching.collect();
        matching.iter().filter_map(|pid| self.processes.remove(pid)).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;
    use std::process::{Command, Stdio};
    use std::time::Duration;

    use rustix::fs::{MemfdFlags, SealFlags, memfd_create};
    use rustix::process::Pid;

    use super::super::process::pidfd;
    use super::*;

    fn own_handle() -> Arc<ProcessHandle> {
        Arc::new(ProcessHandle::new(None, "/proc/self".into()))
    }

    fn blocks(mirror: &Mirror) -> u64 {
        rustix::fs::fstat(&*mirror.file).expect("facts").st_blocks.cast_unsigned() * 512
    }

    #[test]
    fn a_mirror_keeps_its_number_and_content_in_another_size() {
        let small = Mirror::new(2 << 20).expect("a mirror");
        assert_eq!(blocks(&small), 2 << 20, "the memory is allocated");
        small.file.write_all_at(b"content", 100).expect("written");
        let large = small.resized(6 << 20).expect("a mirror");
        assert_eq!((large.number, large.bytes, blocks(&large)), (small.number, 6 << 20, 6 << 20));
        let again = large.resized(2 << 20).expect("a mirror");
        assert_eq!((again.bytes, blocks(&again)), (2 << 20, 2 << 20), "the memory is freed");
        let mut content = [0; 7];
        again.file.read_exact_at(&mut content, 100).expect("read");
        assert_eq!(&content, b"content");
        assert_ne!(Mirror::new(0).expect("a mirror").number, small.number);
    }

    #[test]
    fn a_mirror_with_holes_has_the_memory_that_was_written() {
        let mirror = Mirror::with_holes(6 << 20).expect("a mirror");
        assert_eq!((mirror.allocated_bytes(), mirror.data().expect("data")), (0, Vec::new()));
        mirror.file.write_all_at(&[1; 2 << 20], 2 << 20).expect("written");
        assert_eq!(
            (mirror.allocated_bytes(), mirror.data().expect("data")),
            (2 << 20, vec![2 << 20..4 << 20])
        );
        let larger = mirror.resized(8 << 20).expect("a mirror");
        larger.file.write_all_at(&[1; 2 << 20], 6 << 20).expect("written");
        assert_eq!(larger.data().expect("data"), [2 << 20..4 << 20, 6 << 20..8 << 20]);
        assert_eq!(larger.resized(2 << 20).expect("a mirror").allocated_bytes(), 0);
    }

    /// A sealed file, which cannot grow, simulates a lack of memory.
    #[test]
    fn a_mirror_that_cannot_grow_keeps_its_size() {
        let file = memfd_create("full", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("a file");
        rustix::fs::ftruncate(&file, 2 << 20).expect("its size");
        rustix::fs::fcntl_add_seals(&file, SealFlags::GROW).expect("sealed");
        let mirror = Mirror {
            number: 7,
            bytes: 2 << 20,
            file: Arc::new(file.into()),
            has_holes: false,
            is_partial: false,
            window: None,
            history: Arc::default(),
        };
        assert!(mirror.resized(4 << 20).is_err());
        assert_eq!(mirror.file.metadata().expect("facts").len(), 2 << 20);
    }

    #[test]
    fn a_mirror_shrinks_only_by_half_or_more() {
        let mib = |mib: u64| mib << 20;
        assert_eq!(Mirror::bytes_for(1, 0), mib(2));
        assert_eq!(Mirror::bytes_for(mib(2) + 1, mib(2)), mib(4));
        assert_eq!(Mirror::bytes_for(mib(50), mib(100)), mib(100));
        assert_eq!(Mirror::bytes_for(mib(48), mib(100)), mib(48));
        assert_eq!(Mirror::bytes_for(mib(100), mib(100)), mib(100));
        assert_eq!(Mirror::bytes_for(u64::MAX, 0), u64::MAX);
    }

    #[test]
    fn memory_of_an_exited_process_is_removed() {
        let mut child = Command::new("sleep")
            .arg("1000")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("a process");
        let fd = Pid::from_raw(i32::try_from(child.id()).expect("fits")).and_then(pidfd);
        let handle = Arc::new(ProcessHandle::new(fd, format!("/proc/{}", child.id()).into()));
        let mut holdings = Holdings::default();
        let mirror = Mirror::new(0).expect("a mirror");
        assert!(holdings.set_mirror(1, &handle, Some(mirror.clone())).is_none());
        assert!(holdings.set_mirror(2, &own_handle(), Some(mirror)).is_none());
        assert!(holdings.remove_ended().is_empty());
        child.kill().expect("killed");
        handle.wait_for_exit(Duration::from_secs(300));
        assert_eq!(holdings.remove_ended().len(), 1);
        assert!(holdings.mirror(1).is_none() && holdings.mirror(2).is_some());
        child.wait().expect("reaped");
    }

    #[test]
    fn mirrors_of_processes_that_were_not_restored_are_removed() {
        let mut holdings = Holdings::default();
        for pid in 1..=3 {
            holdings.adopt(pid, Mirror::to_be_filled(7, 0, true).expect("a mirror"));
        }
        assert!(holdings.remove_ended().is_empty(), "they are not restored yet");
        let handle = own_handle();
        holdings.set_handle(3, &handle);
        assert_eq!(holdings.remove_unexpected(|pid| (pid == 1).then_some(&handle)).len(), 1);
        assert!(holdings.mirror(1).is_some() && holdings.mirror(2).is_none() && holdings.mirror(3).is_some());
        assert!(holdings.remove_unexpected(|_| None).is_empty(), "already removed");
    }
}
