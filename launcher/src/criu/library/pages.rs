//! Pages that ckpt-run copies itself. CRIU asks the kernel which pages a process has; the answer leaves these out. So CRIU
//! saves the mappings, and not what is in them.
//!
//! ckpt-run lists them in a file without a name ([`LIST_NAME`]), which CRIU inherits. It is part of `entry.rs`, and of
//! ckpt-run's unit tests.

use std::ops::Range;

/// The name of the list, a memfd.
pub const LIST_NAME: &str = "ckpt-copied-pages";
/// PID, first address and end of a range, in the machine's byte order.
pub const ENTRY_BYTES: usize = 3 * size_of::<u64>();

/// A page in /proc/PID/pagemap.
const PAGE_BYTES: u64 = 4096;
/// An entry of /proc/PID/pagemap.
const PAGEMAP_ENTRY_BYTES: u64 = 8;

/// A category of pages, of linux/fs.h.
const PAGE_IS_GUARD: u64 = 1 << 8;

/// `struct page_region` of linux/fs.h.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    pub start: u64,
    pub end: u64,
    pub categories: u64,
}

/// What ckpt-run copies itself.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Copied(Vec<(u64, Range<u64>)>);

impl Copied {
    /// Reads the list; `None` if it is empty.
    pub fn parse(list: &[u8]) -> Option<Self> {
        let number = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_ne_bytes);
        let entries = list.chunks_exact(ENTRY_BYTES).map(|entry| {
            let (pid, range) = entry.split_at(size_of::<u64>());
            let (start, end) = range.split_at(size_of::<u64>());
            (number(pid), number(start)..number(end))
        });
        let mut entries: Vec<_> = entries.filter(|(_, range)| !range.is_empty()).collect();
        entries.sort_by_key(|(pid, range)| (*pid, range.start));
        (!entries.is_empty()).then_some(Self(entries))
    }

    /// The ranges of a process that end behind an address, in order.
    fn behind(&self, pid: u64, address: u64) -> impl Iterator<Item = &Range<u64>> {
        let first = self.0.partition_point(|(of, range)| (*of, range.end) <= (pid, address));
        self.0[first..].iter().take_while(move |(of, _)| *of == pid).map(|(_, range)| range)
    }

    /// Takes the copied pages out of what PAGEMAP_SCAN has found in a process. Guards (MADV_GUARD_INSTALL) stay. If more than
    /// `most` regions are left, the rest is cut off: returns where it begins.
    pub fn take_out(&self, pid: u64, found: &[Region], most: usize) -> (Vec<Region>, Option<u64>) {
        let mut left = Vec::with_capacity(found.len());
        for region in found {
            if region.categories & PAGE_IS_GUARD != 0 {
                left.push(*region);
                continue;
            }
            let mut start = region.start;
            for copied in self.behind(pid, region.start).take_while(|copied| copied.start < region.end) {
                if start < copied.start {
                    left.push(Region { start, end: copied.start, ..*region });
                }
                start = start.max(copied.end);
            }
            if start < region.end {
                left.push(Region { start, ..*region });
            }
        }
        let cut_at = left.get(most).map(|region| region.start);
        left.truncate(most);
        (left, cut_at)
    }

    /// The same for entries that were read from /proc/PID/pagemap at an offset.
    pub fn clear(&self, pid: u64, entries: &mut [u8], offset: u64) {
        let address = |offset: u64| offset / PAGEMAP_ENTRY_BYTES * PAGE_BYTES;
        let place =
            |address: u64| (address / PAGE_BYTES * PAGEMAP_ENTRY_BYTES).saturating_sub(offset) as usize;
        let (first, end) = (address(offset), address(offset + entries.len() as u64));
        for copied in self.behind(pid, first).take_while(|copied| copied.start < end) {
            entries[place(copied.start)..place(copied.end.min(end))].fill(0);
        }
    }
}
