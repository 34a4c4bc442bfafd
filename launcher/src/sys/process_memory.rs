//! Memory of other processes: which pages they have, and copies of these pages.
#![allow(unsafe_code)]

use memmap2::{Advice, MmapOptions, MmapRaw};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Of a page, bytes: that of x86-64.
pub const PAGE_BYTES: u64 = 4096;
/// The most ranges of one call (UIO_MAXIOV of linux/uio.h).
pub const MOST_RANGES: usize = 1024;

/// Entries of /proc/PID/pagemap; see pagemap.rst of the kernel's documentation.
const ENTRY_BYTES: u64 = 8;
const IS_PRESENT: u64 = 1 << 63;
const IS_SWAPPED: u64 = 1 << 62;
/// Mapped by one process only; since Linux 4.2.
const IS_EXCLUSIVE: u64 = 1 << 56;
const FRAME: u64 = (1 << 55) - 1;
/// Entries that are read at once.
const ENTRIES: usize = 64 << 10;

/// The ioctl PAGEMAP_SCAN of linux/fs.h; since Linux 6.7.
const PAGEMAP_SCAN: libc::c_ulong = 0xc060_6610;
const PAGE_IS_PRESENT: u64 = 1 << 3;
const PAGE_IS_SWAPPED: u64 = 1 << 4;
const PAGE_IS_PFNZERO: u64 = 1 << 5;
const PAGE_IS_FILE: u64 = 1 << 2;
/// A page of MADV_GUARD_INSTALL; since Linux 6.15.
const PAGE_IS_GUARD: u64 = 1 << 8;
/// Regions that are returned at once.
const REGIONS: usize = 4096;

/// `struct pm_scan_arg` of linux/fs.h.
#[repr(C)]
#[derive(Default)]
struct ScanArguments {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    regions: u64,
    most_regions: u64,
    most_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// `struct page_region` of linux/fs.h.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Region {
    start: u64,
    end: u64,
    categories: u64,
}

/// Which pages a process has.
pub struct PageTable {
    pagemap: File,
}

impl PageTable {
    /// That of a process, by its PID here.
    ///
    /// # Errors
    /// When the process has ended, or this process may not look at it.
    pub fn open(pid: i32) -> io::Result<Self> {
        Ok(Self { pagemap: File::open(format!("/proc/{pid}/pagemap"))? })
    }

    /// The pages with content in a range of private memory without a file, in memory or in swap; as few ranges as possible, in
    /// order. Pages that were only read, and contain zeros, are not among them.
    ///
    /// # Errors
    /// When the process has ended; on kernels before 6.7 also when this process may not see which pages contain zeros.
    pub fn present(&self, range: Range<u64>) -> io::Result<Vec<Range<u64>>> {
        match self.scan(&range) {
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOTTY | libc::EINVAL)) => {
                self.read(&range)
            }
            other => other,
        }
    }

    /// Whether all pages in these ranges are in memory, and no other process has one of them. `false` also if that cannot be read.
    #[must_use]
    pub fn are_exclusive(&self, ranges: &[Range<u64>]) -> bool {
        ranges.iter().all(|range| {
            let Ok(count) = usize::try_from((range.end - range.start) / PAGE_BYTES) else { return false };
            let mut entries = vec![0; count * ENTRY_BYTES as usize];
            let read = self.pagemap.read_exact_at(&mut entries, range.start / PAGE_BYTES * ENTRY_BYTES);
            let mut numbers = entries.as_chunks().0.iter().map(|entry| u64::from_ne_bytes(*entry));
            read.is_ok() && numbers.all(|entry| entry & IS_PRESENT != 0 && entry & IS_EXCLUSIVE != 0)
        })
    }

    fn scan(&self, range: &Range<u64>) -> io::Result<Vec<Range<u64>>> {
        // Older kernels do not know all categories.
        static LEFT_OUT: AtomicU64 = AtomicU64::new(PAGE_IS_FILE | PAGE_IS_PFNZERO | PAGE_IS_GUARD);
        let mut found = Vec::new();
        let mut regions = vec![Region::default(); REGIONS];
        let mut start = range.start;
        while start < range.end {
            let left_out = LEFT_OUT.load(Ordering::Relaxed);
            let mut arguments = ScanArguments {
                size: size_of::<ScanArguments>() as u64,
                start,
                end: range.end,
                regions: regions.as_mut_ptr() as u64,
                most_regions: REGIONS as u64,
                category_inverted: left_out,
                category_mask: left_out,
                category_anyof_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
                return_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
                ..ScanArguments::default()
            };
            // SAFETY: the kernel writes to `arguments`, and at most `most_regions` regions, all of which outlive the call.
            let count = unsafe { libc::ioctl(self.pagemap.as_raw_fd(), PAGEMAP_SCAN, &raw mut arguments) };
            let Ok(count) = usize::try_from(count) else {
                let error = io::Error::last_os_error();
                if error.raw_os_error() == Some(libc::EINVAL) && left_out & PAGE_IS_GUARD != 0 {
                    LEFT_OUT.store(left_out & !PAGE_IS_GUARD, Ordering::Relaxed);
                    continue;
                }
                return Err(error);
            };
            regions[..count].iter().for_each(|region| add(&mut found, region.start..region.end));
            // Linux 6.18 may say that it has come less far than it has: it would find regions twice.
            let reached = regions[..count].last().map_or(0, |last| last.end).max(arguments.walk_end);
            if reached <= start {
                return Err(io::ErrorKind::InvalidData.into());
            }
            start = reached;
        }
        Ok(found)
    }

    fn read(&self, range: &Range<u64>) -> io::Result<Vec<Range<u64>>> {
        let zero = zero_frame().ok_or(io::ErrorKind::Unsupported)?;
        let mut found = Vec::new();
        let mut entries = vec![0; ENTRIES * ENTRY_BYTES as usize];
        let mut start = range.start;
        while start < range.end {
            let count = ((range.end - start) / PAGE_BYTES).min(ENTRIES as u64);
            let read = &mut entries[..(count * ENTRY_BYTES) as usize];
            self.pagemap.read_exact_at(read, start / PAGE_BYTES * ENTRY_BYTES)?;
            let numbers = read.as_chunks().0.iter().map(|entry| u64::from_ne_bytes(*entry));
            for (entry, address) in numbers.zip((start..).step_by(PAGE_BYTES as usize)) {
                let has_content = entry & IS_SWAPPED != 0 || entry & IS_PRESENT != 0 && entry & FRAME != zero;
                if has_content {
                    add(&mut found, address..address + PAGE_BYTES);
                }
            }
            start += count * PAGE_BYTES;
        }
        Ok(found)
    }
}

/// Adds a range behind those that were found.
fn add(found: &mut Vec<Range<u64>>, range: Range<u64>) {
    match found.last_mut() {
        Some(last) if last.end == range.start => last.end = range.end,
        _ => found.push(range),
    }
}

/// The frame that all processes have where they have read memory that was never written; `None` if this process may not see
/// it (CAP_SYS_ADMIN).
fn zero_frame() -> Option<u64> {
    static FOUND: OnceLock<Option<u64>> = OnceLock::new();
    *FOUND.get_or_init(|| {
        let bytes = PAGE_BYTES as usize;
        // SAFETY: new memory, which nothing else has.
        let page = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::READ, MapFlags::PRIVATE) }
            .ok()?;
        // SAFETY: one byte of it.
        let _ = unsafe { page.cast::<u8>().read_volatile() };
        let mut entry = [0; ENTRY_BYTES as usize];
        let offset = page as u64 / PAGE_BYTES * ENTRY_BYTES;
        let read =
            File::open("/proc/self/pagemap").and_then(|pagemap| pagemap.read_exact_at(&mut entry, offset));
        // SAFETY: nothing refers to it.
        let _ = unsafe { munmap(page, bytes) };
        read.ok()?;
        Some(u64::from_ne_bytes(entry) & FRAME).filter(|&frame| frame != 0)
    })
}

/// A file in memory to which memory of processes is copied, by several threads at a time.
pub struct CopyBuffer {
    map: MmapRaw,
}

impl CopyBuffer {
    /// Maps a file, which is this long, and which nobody shortens as long as the buffer exists.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn new(file: &File, bytes: u64) -> io::Result<Self> {
        let bytes = usize::try_from(bytes).map_err(io::Error::other)?;
        Ok(Self { map: MmapOptions::new().len(bytes).map_raw(file)? })
    }

    /// The length of the file.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.map.len() as u64
    }

    /// Allocates a part of the file's memory in advance; since Linux 5.14.
    ///
    /// # Errors
    /// When there is not enough memory, or the kernel is older.
    pub fn allocate(&self, part: Range<u64>) -> io::Result<()> {
        let place = |offset| usize::try_from(offset).map_err(io::Error::other);
        self.map.advise_range(Advice::PopulateWrite, place(part.start)?, place(part.end - part.start)?)
    }

    /// Copies ranges of the memory of a process, at most [`MOST_RANGES`], one after the other to the file, from an offset on.
    /// The process has to be stopped, or the copy may be of no single moment. Pages that it shares with another process since
    /// one has forked the other become its own: the kernel copies them for it (since Linux 5.19).
    ///
    /// # Errors
    /// When a page cannot be read, this process may not do so, or the file is too short.
    pub fn copy(&self, pid: i32, ranges: &[Range<u64>], offset: u64) -> io::Result<()> {
        let part = |range: &Range<u64>| {
            Ok(libc::iovec { iov_base: range.start as *mut libc::c_void, iov_len: length(range)? })
        };
        let remote = ranges.iter().map(part).collect::<io::Result<Vec<_>>>()?;
        let bytes: usize = remote.iter().map(|part| part.iov_len).sum();
        let local = libc::iovec { iov_base: self.place(offset, bytes)?.cast(), iov_len: bytes };
        // SAFETY: the kernel writes to the mapping, which lives as long as `self`, and to which nothing refers. The other
        // addresses are those of another process.
        let copied = unsafe {
            libc::process_vm_readv(
                pid,
                &raw const local,
                1,
                remote.as_ptr(),
                remote.len() as libc::c_ulong,
                0,
            )
        };
        is_all(copied, bytes)
    }

    /// As [`Self::copy`], by the file /proc/PID/mem. That is slower, and shared pages stay shared.
    ///
    /// # Errors
    /// As there.
    pub fn copy_shared(&self, memory: &File, ranges: &[Range<u64>], mut offset: u64) -> io::Result<()> {
        for range in ranges {
            let bytes = length(range)?;
            let place = self.place(offset, bytes)?;
            let address = libc::off_t::try_from(range.start).map_err(io::Error::other)?;
            // SAFETY: the kernel writes to the mapping, which lives as long as `self`, and to which nothing refers.
            is_all(unsafe { libc::pread(memory.as_raw_fd(), place.cast(), bytes, address) }, bytes)?;
            offset += bytes as u64;
        }
        Ok(())
    }

    /// So many bytes of the mapping.
    fn place(&self, offset: u64, bytes: usize) -> io::Result<*mut u8> {
        let offset = usize::try_from(offset).map_err(io::Error::other)?;
        if offset.checked_add(bytes).is_none_or(|end| end > self.map.len()) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // SAFETY: the offset is in the mapping.
        Ok(unsafe { self.map.as_mut_ptr().add(offset) })
    }
}

fn length(range: &Range<u64>) -> io::Result<usize> {
    usize::try_from(range.end - range.start).map_err(io::Error::other)
}

/// An error unless a system call has copied so many bytes.
fn is_all(copied: isize, bytes: usize) -> io::Result<()> {
    match usize::try_from(copied) {
        Ok(copied) if copied == bytes => Ok(()),
        Ok(_) => Err(io::ErrorKind::UnexpectedEof.into()),
        Err(_) => Err(io::Error::last_os_error()),
    }
}

/// The addresses at which more than one process has something. The mappings of one process do not overlap.
#[must_use]
pub fn shared_addresses<'a>(mappings: impl Iterator<Item = &'a Range<u64>>) -> Vec<Range<u64>> {
    let mut ends: Vec<_> = mappings.flat_map(|range| [(range.start, 1_i64), (range.end, -1)]).collect();
    // At one address, what ends comes first.
    ends.sort_unstable();
    let (mut count, mut found) = (0, Vec::<Range<u64>>::new());
    for (address, change) in ends {
        let before = count;
        count += change;
        match found.last_mut() {
            _ if before < 2 && count >= 2 => found.push(address..address),
            Some(last) if before >= 2 && count < 2 => last.end = address,
            _ => {}
        }
    }
    found
}

/// Whether a range overlaps one of these, which are in order.
#[must_use]
pub fn overlaps(ranges: &[Range<u64>], range: &Range<u64>) -> bool {
    let next = ranges.partition_point(|other| other.end <= range.start);
    ranges.get(next).is_some_and(|other| other.start < range.end)
}

/// Writes to the memory of another process, each part at its address.
///
/// # Errors
/// When the process has no memory there that it can write to, or this process may not do so.
pub fn write(pid: i32, parts: &[(u64, &[u8])]) -> io::Result<()> {
    if pid == std::process::id().cast_signed() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for parts in parts.chunks(MOST_RANGES) {
        let part =
            |start: *mut libc::c_void, bytes: &[u8]| libc::iovec { iov_base: start, iov_len: bytes.len() };
        let local: Vec<_> =
            parts.iter().map(|(_, bytes)| part(bytes.as_ptr().cast_mut().cast(), bytes)).collect();
        let remote: Vec<_> = parts.iter().map(|(to, bytes)| part(*to as *mut libc::c_void, bytes)).collect();
        let count = parts.len() as libc::c_ulong;
        // SAFETY: the kernel reads from the slices; the other addresses are those of another process.
        let written =
            unsafe { libc::process_vm_writev(pid, local.as_ptr(), count, remote.as_ptr(), count, 0) };
        is_all(written, parts.iter().map(|(_, bytes)| bytes.len()).sum())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::mm::{Advice, madvise};

    /// So many regions that the kernel returns them in several parts.
    const PAGES: usize = 6144;
    const WRITTEN: [usize; 4] = [3, 4, 5, 9];
    const SCATTERED: usize = 63;

    /// New memory with content in some pages. Some have only been read.
    struct Memory(*mut u8);

    impl Memory {
        fn new() -> Self {
            let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
            let bytes = PAGES * PAGE_BYTES as usize;
            // SAFETY: new memory, all of which is written or read below.
            let start = unsafe {
                mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, flags)
            };
            let start = start.unwrap().cast::<u8>();
            // SAFETY: the same memory.
            unsafe { madvise(start.cast(), bytes, Advice::LinuxNoHugepage) }.unwrap();
            let page = |number: usize| start.wrapping_add(number * PAGE_BYTES as usize);
            for number in WRITTEN.into_iter().chain((SCATTERED..PAGES).step_by(3)) {
                // SAFETY: a byte of it.
                unsafe { page(number).write_volatile(number as u8) };
            }
            for number in [0, 20].into_iter().chain((SCATTERED + 1..PAGES).step_by(3)) {
                // SAFETY: as above.
                assert_eq!(unsafe { page(number).read_volatile() }, 0);
            }
            Self(start)
        }

        fn pages(&self, pages: Range<u64>) -> Range<u64> {
            let address = |page| self.0 as u64 + page * PAGE_BYTES;
            address(pages.start)..address(pages.end)
        }
    }

    impl Drop for Memory {
        fn drop(&mut self) {
            // SAFETY: nothing refers to it.
            unsafe { munmap(self.0.cast(), PAGES * PAGE_BYTES as usize) }.unwrap();
        }
    }

    #[test]
    fn pages_with_content_are_found_in_both_ways_and_copied() {
        let memory = Memory::new();
        let pid = std::process::id().cast_signed();
        let table = PageTable::open(pid).unwrap();
        let scattered = (SCATTERED as u64..PAGES as u64).step_by(3).map(|page| page..page + 1);
        let pages = [3..6, 9..10].into_iter().chain(scattered);
        let wanted: Vec<_> = pages.map(|pages| memory.pages(pages)).collect();
        let all = memory.pages(0..PAGES as u64);
        assert_eq!(table.present(all.clone()).unwrap(), wanted);
        if zero_frame().is_some() {
            assert_eq!(table.read(&all).unwrap(), wanted);
        }
        let wanted = &wanted[..3];
        let file = tempfile::tempfile().unwrap();
        file.set_len(6 * PAGE_BYTES).unwrap();
        let buffer = CopyBuffer::new(&file, 6 * PAGE_BYTES).unwrap();
        buffer.copy(pid, wanted, PAGE_BYTES).unwrap();
        let mut copied = vec![0_u8; 6 * PAGE_BYTES as usize];
        file.read_exact_at(&mut copied, 0).unwrap();
        let firsts: Vec<_> = copied.iter().step_by(PAGE_BYTES as usize).collect();
        assert_eq!(firsts, [&0, &3, &4, &5, &9, &63]);
        let own_memory = File::open("/proc/self/mem").unwrap();
        file.write_all_at(&vec![0; 6 * PAGE_BYTES as usize], 0).unwrap();
        buffer.copy_shared(&own_memory, wanted, PAGE_BYTES).unwrap();
        let mut again = vec![1_u8; copied.len()];
        file.read_exact_at(&mut again, 0).unwrap();
        assert!(again == copied);
        buffer.copy_shared(&own_memory, wanted, 2 * PAGE_BYTES).expect_err("the file is too short");
        buffer
            .copy(pid, &[memory.pages(3..4), 0..PAGE_BYTES], 0)
            .expect_err("there is no memory at this address");
        buffer.copy(pid, wanted, 2 * PAGE_BYTES).expect_err("the file is too short");
    }

    #[test]
    fn addresses_of_several_processes_are_found() {
        let all = [0..10, 20..30, 5..8, 25..40, 30..35, 50..60, 60..70];
        let shared = shared_addresses(all.iter());
        assert_eq!(shared, [5..8, 25..30, 30..35]);
        assert_eq!(shared_addresses([0..10, 0..10, 0..10].iter()), [0..10]);
        assert!(shared_addresses([].iter()).is_empty());
        let found = [0..5, 4..6, 7..9, 8..25, 24..26, 35..50].map(|range| overlaps(&shared, &range));
        assert_eq!(found, [false, true, true, false, true, false]);
    }
}
