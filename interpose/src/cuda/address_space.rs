//! Keeps the driver's address ranges free while the driver is checkpointed.
//!
//! The driver's checkpoint unmaps the address ranges of the device. The C library may then map memory of another
//! thread there, and the driver's restore maps over whatever it finds. So the freed ranges are filled with
//! inaccessible mappings, which the restore replaces. (The hazard is described in google/gvisor issue 14776.)
//!
//! Until they are filled, a decoy range attracts the mappings of other threads: Linux takes the highest free range
//! that is large enough (mmap's top-down layout). The decoy is reserved before the driver's ranges, so it lies above
//! them. Free ranges above the decoy are filled, so that the driver's memory is not placed there.

use std::ffi::c_void;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use thiserror::Error;

use super::memory::physical::registry;
use super::memory::reservations;
use crate::process;

/// An address range, its end not included.
type Range = (u64, u64);

/// More than a program maps while the driver takes its checkpoint.
const DECOY_BYTES: u64 = 64 << 30;
/// How long to wait until another thread unmaps memory at the driver's addresses.
const UNMAP_TIMEOUT: Duration = Duration::from_secs(2);
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// The decoy range.
struct Decoy {
    range: Range,
    /// The parts of it that are reserved.
    reserved: Vec<Range>,
}

static DECOY: Mutex<Option<Decoy>> = Mutex::new(None);

fn decoy() -> MutexGuard<'static, Option<Decoy>> {
    DECOY.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Decoy {
    /// Reserves the free parts of it again, and fills free ranges above it.
    fn close(&mut self) {
        let Ok(maps) = process::mappings() else { return };
        let now = ranges(&maps, |_| true);
        self.reserved.extend(free_parts(self.range, &now).into_iter().filter(|hole| occupy(*hole).is_ok()));
        for hole in free_parts((self.range.1, highest()), &now) {
            // Another thread may have been faster. Filled ranges stay filled: they cost address space only.
            let _ = occupy(hole);
        }
    }
}

/// Above the loader nothing is mapped but the stack, which grows. 0 if its address is unknown.
fn highest() -> u64 {
    // SAFETY: reads a value that the kernel has handed to the process.
    unsafe { libc::getauxval(libc::AT_BASE) }
}

/// To be called before the driver maps anything. Without room in the address space there is no decoy.
pub(super) fn prepare() {
    // In the child of a fork it may stay locked.
    let Ok(mut decoy) = DECOY.try_lock() else { return };
    if decoy.is_none()
        && let Ok(start) = reserve(0, DECOY_BYTES, 0)
    {
        let range = (start, start + DECOY_BYTES);
        decoy.insert(Decoy { range, reserved: vec![range] }).close();
    }
}

/// The address space before the driver's checkpoint. While it lives, the decoy is open.
pub(super) struct Before {
    /// Ranges that may belong to the driver: inaccessible ones, and mappings of devices.
    maybe: Vec<Range>,
    /// Ranges that belong to the driver: device memory, and addresses reserved for it.
    surely: Vec<Range>,
}

/// Scans the address space and opens the decoy.
///
/// # Errors
/// `/proc/self/maps` cannot be read.
pub(super) fn scan() -> Result<Before, AddressSpaceError> {
    let mut decoy = decoy();
    let ours = decoy.as_mut().map(|decoy| std::mem::take(&mut decoy.reserved)).unwrap_or_default();
    for (start, end) in ours {
        // SAFETY: the range is the decoy's, which holds nothing.
        unsafe { libc::munmap(start as *mut c_void, (end - start) as usize) };
    }
    drop(decoy);
    let mut before = Before { maybe: Vec::new(), surely: Vec::new() };
    let maps = process::mappings().map_err(AddressSpaceError::ReadMaps)?;
    before.maybe = ranges(&maps, may_be_the_drivers);
    let registry = registry();
    let mappings = registry.allocations.values().flat_map(|allocation| &allocation.mappings);
    before.surely = mappings.map(|mapping| (mapping.address, mapping.address + mapping.bytes)).collect();
    drop(registry);
    before.surely.extend(reservations::all());
    before.surely.retain(|range| is_covered(*range, &before.maybe));
    Ok(before)
}

impl Drop for Before {
    fn drop(&mut self) {
        if let Some(decoy) = decoy().as_mut() {
            decoy.close();
        }
    }
}

/// Why the driver's addresses could not be kept free.
#[derive(Debug, Error)]
pub enum AddressSpaceError {
    #[error("cannot read /proc/self/maps")]
    ReadMaps(#[source] io::Error),
    #[error(
        "the addresses {start:#x}-{end:#x}, which belong to the GPU, could not be kept free during the driver's \
         checkpoint"
    )]
    Occupy {
        start: u64,
        end: u64,
        #[source]
        error: io::Error,
    },
    #[error(
        "the addresses {start:#x}-{end:#x}, which belong to the GPU, could not be kept free during the driver's \
         checkpoint: another thread has mapped memory there"
    )]
    Taken { start: u64, end: u64 },
}

/// Fills the ranges that the driver has freed. If another thread has mapped memory there, waits until it is unmapped.
///
/// # Errors
/// A range is still taken: the driver's restore would overwrite it.
pub(super) fn fill(before: &Before) -> Result<(), AddressSpaceError> {
    let deadline = Instant::now() + UNMAP_TIMEOUT;
    loop {
        let maps = process::mappings().map_err(AddressSpaceError::ReadMaps)?;
        let result = try_to_fill(before, &maps);
        if result.is_ok() || Instant::now() >= deadline {
            return result;
        }
        sleep(POLL_INTERVAL);
    }
}

fn try_to_fill(before: &Before, maps: &str) -> Result<(), AddressSpaceError> {
    let now = ranges(maps, |_| true);
    let mut result = Ok(());
    for &range in &before.maybe {
        for (start, end) in free_parts(range, &now) {
            let occupied = occupy((start, end));
            result = result.and(occupied.map_err(|error| AddressSpaceError::Occupy { start, end, error }));
        }
    }
    let others = ranges(maps, |line| !may_be_the_drivers(line));
    match before.surely.iter().find(|range| !is_free(**range, &others)) {
        Some(&(start, end)) => result.and(Err(AddressSpaceError::Taken { start, end })),
        None => result,
    }
}

/// Maps a range that is free.
fn occupy((start, end): Range) -> io::Result<()> {
    let mapped = reserve(start, end - start, libc::MAP_FIXED_NOREPLACE)?;
    // A kernel that does not know the flag takes the address as a hint.
    if mapped == start { Ok(()) } else { Err(io::ErrorKind::AlreadyExists.into()) }
}

/// Maps inaccessible addresses, which cost no memory.
fn reserve(start: u64, bytes: u64, placement: libc::c_int) -> io::Result<u64> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | placement;
    // SAFETY: neither placement replaces anything that is mapped.
    let mapped = unsafe { libc::mmap(start as *mut c_void, bytes as usize, libc::PROT_NONE, flags, -1, 0) };
    if mapped == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(mapped as u64) }
}

/// Parses `/proc/self/maps`: the ranges of the lines that are wanted, sorted, those that touch joined.
fn ranges(maps: &str, is_wanted: impl Fn(&str) -> bool) -> Vec<Range> {
    let mut ranges: Vec<Range> = Vec::new();
    for line in maps.lines().filter(|line| is_wanted(line)) {
        let Some((start, end)) = line.split(' ').next().and_then(|range| range.split_once('-')) else {
            continue;
        };
        let (Ok(start), Ok(end)) = (u64::from_str_radix(start, 16), u64::from_str_radix(end, 16)) else {
            continue;
        };
        match ranges.last_mut() {
            Some(last) if last.1 == start => last.1 = end,
            _ => ranges.push((start, end)),
        }
    }
    ranges
}

fn may_be_the_drivers(line: &str) -> bool {
    let mut fields = line.split_ascii_whitespace();
    let protection = fields.nth(1).unwrap_or("");
    let path = fields.nth(3).unwrap_or("");
    (protection.starts_with("---") && path.is_empty()) || path.starts_with("/dev/nvidia")
}

/// The parts of a range that nothing in `taken` (sorted) covers.
fn free_parts((start, end): Range, taken: &[Range]) -> Vec<Range> {
    let mut parts = Vec::new();
    let mut at = start;
    let first = taken.partition_point(|range| range.1 <= start);
    for &(from, to) in taken.get(first..).unwrap_or_default() {
        if from >= end {
            break;
        }
        if from > at {
            parts.push((at, from));
        }
        at = at.max(to);
    }
    if at < end {
        parts.push((at, end));
    }
    parts
}

fn is_free(range: Range, taken: &[Range]) -> bool {
    free_parts(range, taken) == [range]
}

fn is_covered(range: Range, by: &[Range]) -> bool {
    free_parts(range, by).is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_free_is_found_between_what_is_taken() {
        assert_eq!(free_parts((10, 20), &[]), [(10, 20)]);
        assert_eq!(free_parts((10, 20), &[(0, 10), (20, 30)]), [(10, 20)]);
        assert_eq!(free_parts((10, 20), &[(5, 12), (14, 16), (19, 40)]), [(12, 14), (16, 19)]);
        assert_eq!(free_parts((10, 20), &[(0, 40)]), []);
    }

    #[test]
    fn only_what_may_be_the_drivers_is_kept() {
        let maps = "\
1000-2000 ---p 00000000 00:00 0 \n2000-3000 ---p 00000000 00:00 0 \n3000-4000 rw-p 00000000 00:00 0 [heap]
5000-6000 rw-s 00000000 00:06 12 /dev/nvidia0\n7000-8000 ---p 00001000 fe:01 99 /usr/lib/libc.so.6\n";
        assert_eq!(ranges(maps, may_be_the_drivers), [(0x1000, 0x3000), (0x5000, 0x6000)]);
        assert_eq!(ranges(maps, |_| true).len(), 3);
    }

    /// There is one address space: the decoy of one test would plug the hole of another.
    fn turn() -> MutexGuard<'static, ()> {
        static TURN: Mutex<()> = Mutex::new(());
        TURN.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Three pages, of which the middle one is where the driver's memory is taken to have been.
    fn three_pages() -> Range {
        let start = reserve(0, 3 * PAGE, 0).expect("room");
        (start + PAGE, start + 2 * PAGE)
    }

    const PAGE: u64 = 4096;

    fn unmap((start, end): Range) {
        // SAFETY: the range was mapped by the test and nothing points into it.
        assert_eq!(unsafe { libc::munmap(start as *mut c_void, (end - start) as usize) }, 0);
    }

    fn maps() -> String {
        process::mappings().expect("maps")
    }

    #[test]
    fn a_hole_is_filled_once() {
        let _turn = turn();
        let hole = three_pages();
        let before = scan().expect("maps");
        assert!(is_covered(hole, &before.maybe));
        unmap(hole);
        occupy(hole).expect("free");
        assert!(occupy(hole).is_err());
        assert!(is_covered(hole, &ranges(&maps(), |_| true)));
        unmap((hole.0 - PAGE, hole.1 + PAGE));
    }

    #[test]
    fn holes_above_the_decoy_are_plugged() {
        let _turn = turn();
        let above = three_pages();
        let mut decoy = Decoy { range: (above.0 - PAGE, above.0), reserved: Vec::new() };
        unmap(above);
        decoy.close();
        assert!(is_covered(above, &ranges(&maps(), |_| true)));
        assert!(decoy.reserved.is_empty(), "{:?}", decoy.reserved);
        unmap((above.0 - PAGE, above.1 + PAGE));
    }

    #[test]
    fn what_others_have_mapped_where_device_memory_was_is_told() {
        let _turn = turn();
        let hole = three_pages();
        let before = Before { maybe: vec![(hole.0 - PAGE, hole.1 + PAGE)], surely: vec![hole] };
        assert!(try_to_fill(&before, &maps()).is_ok());
        let fixed = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: replaces a page of the test's own.
        let theirs = unsafe { libc::mmap(hole.0 as *mut c_void, PAGE as usize, access, fixed, -1, 0) };
        assert_eq!(theirs as u64, hole.0);
        let told = try_to_fill(&before, &maps()).expect_err("taken").to_string();
        assert!(told.contains("another thread has mapped memory there"), "{told}");
        unmap(hole);
        assert!(try_to_fill(&before, &maps()).is_ok());
        unmap((hole.0 - PAGE, hole.1 + PAGE));
    }
}
