//! What the launcher holds for the processes of a job that have device memory: mirrors, and parked memory.
//!
//! A mirror holds what a process has on its GPUs, as of its last capture. A process that knows its number knows what
//! is in it, so a number is never given to other content, not by another launcher either. Parked memory is device
//! memory whose exported descriptors are kept here while its process is off the GPU.
//!
//! Both are a process's own: what it holds goes when it exits, or begins anew with another program.

use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use ckpt_protocol::agent::Capture;
use rustix::fs::FallocateFlags;

use super::known::Record;
use super::process::Life;
use crate::files::staging;

/// Sizes are multiples of this: huge pages.
const UNIT_BYTES: u64 = 2 << 20;
/// Memory is taken in steps of this size: the kernel may have to begin a step again when a signal comes.
const STEP_BYTES: u64 = 1 << 30;
/// Numbers are below this, so that every reader of JSON gets them right.
const NUMBERS: u64 = 1 << 53;

/// Memory of the launcher that holds what a process has on its GPUs.
#[derive(Debug, Clone)]
pub struct Mirror {
    /// Which one it is. Never 0.
    pub number: u64,
    /// Its size.
    pub bytes: u64,
    /// Its memory.
    pub file: Arc<File>,
    /// What of its content is in the store. It goes with the memory that it is about.
    record: Arc<Mutex<Record>>,
}

impl Mirror {
    /// A mirror without content, for a process that knows of none.
    ///
    /// # Errors
    /// When the memory cannot be had.
    pub fn new(bytes: u64) -> io::Result<Self> {
        let file = Arc::new(staging::unnamed_file()?);
        let mirror = Self { number: random_number()?, bytes: 0, file, record: Arc::default() };
        mirror.resized(bytes)
    }

    /// A mirror that is to get its content from a snapshot; it has its size then, but no memory yet.
    ///
    /// # Errors
    /// When the kernel refuses the file.
    pub fn to_be_filled(number: u64, bytes: u64) -> io::Result<Self> {
        let file = staging::unnamed_file()?;
        file.set_len(bytes)?;
        Ok(Self { number, bytes, file: Arc::new(file), record: Arc::default() })
    }

    /// Takes what an agent says of a capture, or that it says nothing. Where it has written is kept in the record only.
    pub fn captured(&self, capture: Option<&mut Capture>) {
        let mut own = capture.filter(|capture| capture.mirror == self.number);
        self.record().captured(own.as_deref());
        if let Some(capture) = &mut own {
            capture.written = Vec::new();
        }
    }

    /// What is known of its content.
    pub fn record(&self) -> MutexGuard<'_, Record> {
        self.record.lock()
    }

    /// The size to give to a mirror that has to have room for `needed_bytes`. Memory that is not needed any more is
    /// given back only when it is much.
    pub fn bytes_for(needed_bytes: u64, present_bytes: u64) -> u64 {
        let wanted_bytes = needed_bytes.checked_next_multiple_of(UNIT_BYTES).unwrap_or(u64::MAX);
        if (present_bytes / 2..present_bytes).contains(&wanted_bytes) { present_bytes } else { wanted_bytes }
    }

    /// The same mirror in another size. Its memory is taken now, not when it is first written to.
    ///
    /// # Errors
    /// When there is not enough memory; it has the size that it had then.
    pub fn resized(&self, bytes: u64) -> io::Result<Self> {
        if bytes < self.bytes {
            *self.record() = Record::default();
            self.file.set_len(bytes)?;
        }
        let mut taken_bytes = self.bytes;
        while taken_bytes < bytes {
            let step_bytes = STEP_BYTES.min(bytes - taken_bytes);
            let taken = rustix::io::retry_on_intr(|| {
                rustix::fs::fallocate(&*self.file, FallocateFlags::empty(), taken_bytes, step_bytes)
            });
            if let Err(error) = taken {
                // What was taken by then is not to be kept from others.
                self.file.set_len(self.bytes)?;
                return Err(error.into());
            }
            taken_bytes += step_bytes;
        }
        Ok(Self { bytes, ..self.clone() })
    }
}

fn random_number() -> io::Result<u64> {
    let mut bytes = [0; 8];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok((u64::from_le_bytes(bytes) % NUMBERS).max(1))
}

/// Exported device memory that is kept alive for a process.
#[derive(Debug, Default)]
pub struct Parked {
    /// In the order in which they came; `None` for one that was given back.
    descriptors: Vec<Option<OwnedFd>>,
    /// Some could not be kept, so none is.
    has_failed: bool,
}

impl Parked {
    pub fn count(&self) -> usize {
        self.descriptors.len()
    }
}

/// What is held for one process.
#[derive(Debug, Default)]
pub struct Held {
    /// `None` while the process is being restored.
    life: Option<Arc<Life>>,
    mirror: Option<Mirror>,
    parked: Parked,
}

/// What is held for all processes of a job, by their IDs in the job's PID namespace.
///
/// What its methods return to be dropped may be much memory: better where no lock is held.
#[derive(Debug, Default)]
pub struct Holdings {
    processes: BTreeMap<u32, Held>,
}

impl Holdings {
    pub fn mirror(&self, pid: u32) -> Option<&Mirror> {
        self.processes.get(&pid)?.mirror.as_ref()
    }

    /// Gives a process a mirror, or none any more.
    #[must_use]
    pub fn set_mirror(&mut self, pid: u32, life: &Arc<Life>, mirror: Option<Mirror>) -> Option<Mirror> {
        let held = self.processes.entry(pid).or_default();
        held.life = Some(Arc::clone(life));
        std::mem::replace(&mut held.mirror, mirror)
    }

    /// What a process will need that is being restored.
    pub fn adopt(&mut self, pid: u32, mirror: Mirror) {
        self.processes.insert(pid, Held { mirror: Some(mirror), ..Held::default() });
    }

    /// The process is there again.
    pub fn is_back(&mut self, pid: u32, life: &Arc<Life>) {
        if let Some(held) = self.processes.get_mut(&pid) {
            held.life = Some(Arc::clone(life));
        }
    }

    /// Keeps descriptors for a process; `None` stands for some that did not come. Says whether all of this attempt are
    /// kept, and returns what is to be dropped.
    #[must_use]
    pub fn park(
        &mut self,
        pid: u32,
        life: &Arc<Life>,
        descriptors: Option<Vec<OwnedFd>>,
    ) -> (bool, Vec<Option<OwnedFd>>) {
        let held = self.processes.entry(pid).or_default();
        held.life = Some(Arc::clone(life));
        let came = descriptors.is_some();
        let descriptors = descriptors.unwrap_or_default().into_iter().map(Some);
        if came && !held.parked.has_failed {
            held.parked.descriptors.extend(descriptors);
            return (true, Vec::new());
        }
        held.parked.has_failed = true;
        let mut dropped = std::mem::take(&mut held.parked.descriptors);
        dropped.extend(descriptors);
        (false, dropped)
    }

    pub fn parked_count(&self, pid: u32) -> usize {
        self.processes.get(&pid).map_or(0, |held| held.parked.count())
    }

    /// Gives parked memory back, each piece once: all that is asked for, or nothing.
    pub fn unpark(&mut self, pid: u32, first: usize, count: usize) -> Vec<OwnedFd> {
        let asked = first.checked_add(count).and_then(|end| {
            let held = self.processes.get_mut(&pid)?;
            held.parked.descriptors.get_mut(first..end)
        });
        match asked {
            Some(asked) if asked.iter().all(Option::is_some) => {
                asked.iter_mut().filter_map(Option::take).collect()
            }
            _ => Vec::new(),
        }
    }

    /// The process is on its GPUs again, or still is.
    #[must_use]
    pub fn take_parked(&mut self, pid: u32) -> Parked {
        self.processes.get_mut(&pid).map(|held| std::mem::take(&mut held.parked)).unwrap_or_default()
    }

    /// The process has begun anew.
    #[must_use]
    pub fn forget(&mut self, pid: u32) -> Option<Held> {
        self.processes.remove(&pid)
    }

    /// Those whose processes have exited or executed another program.
    #[must_use]
    pub fn sweep(&mut self) -> Vec<Held> {
        self.remove_if(|_, held| held.life.as_ref().is_some_and(|life| life.is_over()))
    }

    /// Those whose processes were to be restored and are not among `lives`.
    #[must_use]
    pub fn settle<'a>(&mut self, lives: impl Fn(u32) -> Option<&'a Arc<Life>>) -> Vec<Held> {
        self.remove_if(|pid, held| {
            held.life = held.life.take().or_else(|| lives(pid).cloned());
            held.life.is_none()
        })
    }

    fn remove_if(&mut self, mut is_meant: impl FnMut(u32, &mut Held) -> bool) -> Vec<Held> {
        let meant = self.processes.iter_mut().filter_map(|(&pid, held)| is_meant(pid, held).then_some(pid));
        let meant: Vec<_> = meant.collect();
        meant.iter().filter_map(|pid| self.processes.remove(pid)).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileExt;
    use std::process::{Command, Stdio};
    use std::time::Duration;

    use rustix::fs::{MemfdFlags, SealFlags, memfd_create};
    use rustix::process::Pid;

    use super::super::process::pidfd;
    use super::*;

    fn own_life() -> Arc<Life> {
        Arc::new(Life::of(None, "/proc/self".into()))
    }

    fn blocks(mirror: &Mirror) -> u64 {
        rustix::fs::fstat(&*mirror.file).expect("facts").st_blocks.cast_unsigned() * 512
    }

    #[test]
    fn a_mirror_keeps_its_number_and_content_in_another_size() {
        let small = Mirror::new(2 << 20).expect("a mirror");
        assert_eq!(blocks(&small), 2 << 20, "the memory is taken");
        small.file.write_all_at(b"content", 100).expect("written");
        let large = small.resized(6 << 20).expect("a mirror");
        assert_eq!((large.number, large.bytes, blocks(&large)), (small.number, 6 << 20, 6 << 20));
        let again = large.resized(2 << 20).expect("a mirror");
        assert_eq!((again.bytes, blocks(&again)), (2 << 20, 2 << 20), "the memory is given back");
        let mut content = [0; 7];
        again.file.read_exact_at(&mut content, 100).expect("read");
        assert_eq!(&content, b"content");
        assert_ne!(Mirror::new(0).expect("a mirror").number, small.number);
    }

    /// A file that refuses to grow stands for memory that is used up.
    #[test]
    fn memory_that_is_not_there_leaves_a_mirror_as_it_was() {
        let file = memfd_create("full", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("a file");
        rustix::fs::ftruncate(&file, 2 << 20).expect("its size");
        rustix::fs::fcntl_add_seals(&file, SealFlags::GROW).expect("sealed");
        let mirror =
            Mirror { number: 7, bytes: 2 << 20, file: Arc::new(file.into()), record: Arc::default() };
        assert!(mirror.resized(4 << 20).is_err());
        assert_eq!(mirror.file.metadata().expect("facts").len(), 2 << 20);
    }

    #[test]
    fn a_mirror_shrinks_only_when_that_is_worth_it() {
        let mib = |mib: u64| mib << 20;
        assert_eq!(Mirror::bytes_for(1, 0), mib(2));
        assert_eq!(Mirror::bytes_for(mib(2) + 1, mib(2)), mib(4));
        assert_eq!(Mirror::bytes_for(mib(50), mib(100)), mib(100));
        assert_eq!(Mirror::bytes_for(mib(48), mib(100)), mib(48));
        assert_eq!(Mirror::bytes_for(mib(100), mib(100)), mib(100));
        assert_eq!(Mirror::bytes_for(u64::MAX, 0), u64::MAX);
    }

    #[test]
    fn what_an_exited_process_held_goes() {
        let mut child = Command::new("sleep")
            .arg("1000")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("a process");
        let fd = Pid::from_raw(i32::try_from(child.id()).expect("fits")).and_then(pidfd);
        let life = Arc::new(Life::of(fd, format!("/proc/{}", child.id()).into()));
        let mut holdings = Holdings::default();
        let mirror = Mirror::new(0).expect("a mirror");
        assert!(holdings.set_mirror(1, &life, Some(mirror.clone())).is_none());
        assert!(holdings.set_mirror(2, &own_life(), Some(mirror)).is_none());
        assert!(holdings.sweep().is_empty());
        child.kill().expect("killed");
        life.wait_for_exit(Duration::from_secs(20));
        assert_eq!(holdings.sweep().len(), 1);
        assert!(holdings.mirror(1).is_none() && holdings.mirror(2).is_some());
        child.wait().expect("reaped");
    }

    #[test]
    fn a_restored_process_has_to_be_there() {
        let mut holdings = Holdings::default();
        for pid in 1..=3 {
            holdings.adopt(pid, Mirror::to_be_filled(7, 0).expect("a mirror"));
        }
        assert!(holdings.sweep().is_empty(), "they are not there yet");
        let life = own_life();
        holdings.is_back(3, &life);
        assert_eq!(holdings.settle(|pid| (pid == 1).then_some(&life)).len(), 1);
        assert!(holdings.mirror(1).is_some() && holdings.mirror(2).is_none() && holdings.mirror(3).is_some());
        assert!(holdings.settle(|_| None).is_empty(), "once");
    }

    #[test]
    fn parked_memory_is_given_back_once_and_whole() {
        let (mut holdings, life) = (Holdings::default(), own_life());
        let file = File::open("/dev/null").expect("opened");
        let some =
            |count| Some((0..count).map(|_| file.as_fd().try_clone_to_owned().expect("a copy")).collect());
        assert!(holdings.park(1, &life, some(2)).0 && holdings.park(1, &life, some(1)).0);
        assert_eq!(holdings.parked_count(1), 3);
        for (first, count) in [(0, 4), (3, 1), (usize::MAX, 2)] {
            assert!(holdings.unpark(1, first, count).is_empty(), "{count} from {first}");
        }
        assert!(holdings.unpark(2, 0, 1).is_empty());
        assert_eq!(holdings.unpark(1, 1, 2).len(), 2);
        assert!(holdings.unpark(1, 0, 2).is_empty(), "one of them was given back");
        assert_eq!(holdings.unpark(1, 0, 1).len(), 1);
        assert_eq!(holdings.parked_count(1), 3, "their numbers stay");

        // One that cannot be kept is the end of all, until the next attempt.
        drop(holdings.take_parked(1));
        assert!(holdings.park(1, &life, some(2)).0);
        let (is_kept, dropped) = holdings.park(1, &life, None);
        assert!(!is_kept && dropped.len() == 2 && holdings.parked_count(1) == 0);
        let (is_kept, dropped) = holdings.park(1, &life, some(1));
        assert!(!is_kept && dropped.len() == 1 && holdings.parked_count(1) == 0);
        drop(holdings.take_parked(1));
        assert!(holdings.park(1, &life, some(1)).0);
    }
}
