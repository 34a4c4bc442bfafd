//! Transparent huge pages of a resumed job. CRIU puts memory back page by page: what was in huge pages is not any more,
//! and it takes the kernel's own thread minutes to merge it. Here the kernel is asked to merge it at once, while the job
//! runs. The content stays the same.
//!
//! Only memory with all of its pages is merged, and only where the system's administrator or the program wants huge pages. A
//! page that several processes share, such as one that a forked worker has of its parent, is not merged: each process would
//! get a copy of its own. So a job takes no more memory than before.

use procfs_core::process::{MMPermissions, MemoryMap, VmFlags};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;

use crate::sys::background::Background;
use crate::sys::path_text::read_maps;

const SETTINGS: &str = "/sys/kernel/mm/transparent_hugepage";
/// An entry of /proc/PID/pagemap, in bytes; see pagemap.rst of the kernel's documentation.
const ENTRY_BYTES: u64 = 8;
/// The page is there, and mapped by this process alone.
const IS_OWN: u64 = 1 << 63 | 1 << 56;
/// include/uapi/asm-generic/mman-common.h; since Linux 6.1.
const MADV_COLLAPSE: libc::c_int = 25;

/// What the system allows.
#[derive(Clone, Copy)]
struct Settings {
    /// Of a huge page, in bytes.
    huge_bytes: u64,
    /// For all memory, not only where a program asks for it (madvise(2), MADV_HUGEPAGE).
    is_always: bool,
}

/// Merges the memory of the processes that `pids` finds, by their PIDs here, in a background thread. Does nothing where the kernel cannot, or this
/// process may not.
pub fn merge_in_background(pids: impl FnOnce() -> Vec<i32> + Send + 'static) {
    let Some(settings) = Settings::read() else { return };
    let work = move || {
        Background::default().enter();
        for pid in pids() {
            match merge(pid, settings) {
                Ok(merged_bytes) => {
                    tracing::debug!("process {pid}: {merged_bytes} bytes are in huge pages again");
                }
                Err(error) => {
                    tracing::debug!("process {pid}: its memory is not merged to huge pages: {error}");
                }
            }
        }
    };
    if let Err(error) = std::thread::Builder::new().name("huge-pages".to_owned()).spawn(work) {
        tracing::debug!("memory is not merged to huge pages: {error}");
    }
}

impl Settings {
    fn read() -> Option<Self> {
        let enabled = fs::read_to_string(format!("{SETTINGS}/enabled")).ok()?;
        let huge_bytes =
            fs::read_to_string(format!("{SETTINGS}/hpage_pmd_size")).ok()?.trim().parse().ok()?;
        (!enabled.contains("[never]")).then_some(Self { huge_bytes, is_always: enabled.contains("[always]") })
    }

    /// Whether a mapping may have huge pages, and does not have them everywhere already.
    fn wants(self, map: &MemoryMap) -> bool {
        let value = |name: &str| map.extension.map.get(name).copied().unwrap_or(0);
        let bytes = map.address.1 - map.address.0;
        (self.is_always || map.extension.vm_flags.contains(VmFlags::HG))
            && map.perms.contains(MMPermissions::PRIVATE)
            && map.inode == 0
            && value("THPeligible") == 1
            && value("AnonHugePages") < bytes / self.huge_bytes * self.huge_bytes
    }
}

/// Merges the memory of one process. Returns how much, in bytes.
fn merge(pid: i32, settings: Settings) -> io::Result<u64> {
    let process = Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidInput)?;
    let process = pidfd_open(process, PidfdFlags::empty())?;
    let maps = read_maps(format!("/proc/{pid}/smaps"))?;
    let pagemap = File::open(format!("/proc/{pid}/pagemap"))?;
    let mut merged_bytes = 0;
    for map in maps.0.iter().filter(|map| settings.wants(map)) {
        let Some(&page_bytes) = map.extension.map.get("KernelPageSize") else { continue };
        for part in whole_parts(map.address.0..map.address.1, settings.huge_bytes) {
            if !has_all_own(&pagemap, &part, page_bytes)? {
                continue;
            }
            match collapse(&process, &part) {
                Ok(()) => merged_bytes += settings.huge_bytes,
                Err(error)
                    if matches!(error.raw_os_error(), Some(libc::ESRCH | libc::EPERM | libc::ENOSYS)) =>
                {
                    return Err(error);
                }
                // No huge page is free, or the mapping has changed.
                Err(_) => {}
            }
        }
    }
    Ok(merged_bytes)
}

/// The huge pages that fit into a range of addresses.
fn whole_parts(range: Range<u64>, huge_bytes: u64) -> impl Iterator<Item = Range<u64>> {
    let end = range.end / huge_bytes;
    let first = range.start.div_ceil(huge_bytes);
    (first..end).map(move |number| number * huge_bytes..(number + 1) * huge_bytes)
}

/// Whether a process has all pages of a part, and each of them alone.
fn has_all_own(pagemap: &File, part: &Range<u64>, page_bytes: u64) -> io::Result<bool> {
    let count = (part.end - part.start) / page_bytes;
    let mut entries = vec![0; usize::try_from(count * ENTRY_BYTES).map_err(io::Error::other)?];
    pagemap.read_exact_at(&mut entries, part.start / page_bytes * ENTRY_BYTES)?;
    let entries = entries.as_chunks().0.iter().map(|entry| u64::from_ne_bytes(*entry));
    Ok(entries.into_iter().all(|entry| entry & IS_OWN == IS_OWN))
}

/// process_madvise(2) with MADV_COLLAPSE.
fn collapse(process: &OwnedFd, part: &Range<u64>) -> io::Result<()> {
    let bytes = usize::try_from(part.end - part.start).map_err(io::Error::other)?;
    let base = usize::try_from(part.start).map_err(io::Error::other)?;
    let vector = libc::iovec { iov_base: std::ptr::without_provenance_mut(base), iov_len: bytes };
    // SAFETY: the vector has one element. Its address is one of another process, whose memory keeps its content.
    let done = unsafe {
        libc::syscall(libc::SYS_process_madvise, process.as_raw_fd(), &raw const vector, 1, MADV_COLLAPSE, 0)
    };
    if usize::try_from(done) == Ok(bytes) { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
    use std::io::Read as _;

    /// A child that was forked, and waits. It ends when this is dropped.
    struct Child {
        pid: libc::pid_t,
        /// It waits for the end of this pipe.
        _writer: io::PipeWriter,
    }

    impl Child {
        fn fork() -> Self {
            let (mut reader, writer) = io::pipe().unwrap();
            let own_end = writer.as_raw_fd();
            // SAFETY: the child only closes a descriptor, reads from a pipe, and ends.
            let pid = unsafe { libc::fork() };
            if pid == 0 {
                // SAFETY: it is the child's copy, which it does not use.
                unsafe { libc::close(own_end) };
                let _ = reader.read(&mut [0]);
                // SAFETY: nothing of the parent is to run in the child.
                unsafe { libc::_exit(0) };
            }
            assert!(pid > 0);
            Self { pid, _writer: writer }
        }

        fn end(self) {
            let Self { pid, _writer: writer } = self;
            drop(writer);
            // SAFETY: it is a child of this process, and nobody else waits for it.
            assert_eq!(unsafe { libc::waitpid(pid, std::ptr::null_mut(), 0) }, pid);
        }
    }

    #[test]
    fn a_part_is_merged_once_each_page_was_touched_and_none_is_shared() {
        const BYTES: usize = 2 << 20;
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: the kernel chooses the address.
        let memory = unsafe { mmap_anonymous(std::ptr::null_mut(), 2 * BYTES, protection, flags) }.unwrap();
        // SAFETY: the advice is for the memory that was just mapped, and does not change it.
        let advise = |advice| assert_eq!(unsafe { libc::madvise(memory, 2 * BYTES, advice) }, 0);
        advise(libc::MADV_NOHUGEPAGE);
        // Other tests of this process fork, too.
        advise(libc::MADV_DONTFORK);
        // SAFETY: it was mapped above with this length, is zeroed, and is used here only.
        let bytes = unsafe { std::slice::from_raw_parts_mut(memory.cast::<u8>(), 2 * BYTES) };
        (0..=BYTES).step_by(1024).for_each(|offset| bytes[offset] = 1);
        let maps = read_maps("/proc/self/smaps").unwrap();
        let page_bytes = maps.0[0].extension.map["KernelPageSize"];
        let (pagemap, start) = (File::open("/proc/self/pagemap").unwrap(), memory.addr());
        let has_all = |part: Range<usize>| {
            has_all_own(&pagemap, &(part.start as u64..part.end as u64), page_bytes).unwrap()
        };
        assert!(has_all(start..start + BYTES));
        assert!(!has_all(start + BYTES..start + 2 * BYTES));
        advise(libc::MADV_DOFORK);
        let child = Child::fork();
        advise(libc::MADV_DONTFORK);
        assert!(!has_all(start..start + BYTES), "the child has the same pages");
        // A copy of its own of one page, such as for a counter of references, is not enough.
        bytes[0] = 2;
        assert!(!has_all(start..start + BYTES));
        child.end();
        assert!(has_all(start..start + BYTES));
        // SAFETY: it was mapped above, and nothing refers to it any more.
        unsafe { munmap(memory, 2 * BYTES) }.unwrap();
    }

    #[test]
    fn only_whole_huge_pages_are_parts() {
        let parts = |range| whole_parts(range, 100).collect::<Vec<_>>();
        assert_eq!(parts(150..450), [200..300, 300..400]);
        assert_eq!(parts(100..200), [100..200]);
        assert_eq!(parts(150..250), []);
        assert_eq!(parts(150..190), []);
    }
}
