//! Holes in the address space.
//!
//! The driver's checkpoint unmaps the address ranges of the device. Nothing keeps the C library of another thread from
//! mapping its memory there, and the driver's restore maps its own over whatever it finds. So the holes are filled with
//! mappings that nobody can access, which the restore then replaces. (The hazard is described in google/gvisor issue
//! 14776.)

use std::ffi::c_void;
use std::fs;
use std::io;

/// An address range, its end not included.
type Range = (u64, u64);

/// The ranges that may belong to the driver: those that nobody can access, and mappings of devices.
pub(super) struct Before(Vec<Range>);

/// Looks at the address space before the driver's checkpoint.
///
/// # Errors
/// `/proc/self/maps` cannot be read.
pub(super) fn look() -> io::Result<Before> {
    Ok(Before(ranges(&fs::read_to_string("/proc/self/maps")?, may_be_the_drivers)))
}

/// Fills what has become free since.
///
/// # Errors
/// Says which range has been taken by somebody else: what is there now would be overwritten.
pub(super) fn fill(before: &Before) -> Result<(), String> {
    let maps = fs::read_to_string("/proc/self/maps");
    let maps = maps.map_err(|error| format!("/proc/self/maps cannot be read: {error}"))?;
    let now = ranges(&maps, |_| true);
    for &range in &before.0 {
        for hole in free_parts(range, &now) {
            occupy(hole)?;
        }
    }
    Ok(())
}

fn occupy((start, end): Range) -> Result<(), String> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED_NOREPLACE;
    let bytes = (end - start) as usize;
    // SAFETY: MAP_FIXED_NOREPLACE replaces nothing that is mapped.
    let mapped = unsafe { libc::mmap(start as *mut c_void, bytes, libc::PROT_NONE, flags, -1, 0) };
    if mapped as u64 == start {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    Err(format!(
        "the addresses {start:#x}-{end:#x}, which belong to the GPU, could not be kept free while the driver was away: {error}"
    ))
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

    #[test]
    fn a_hole_is_filled_once() {
        let page = 4096;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                page * 3,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        assert_ne!(start, libc::MAP_FAILED);
        let before = look().expect("maps");
        let from = start as u64 + page as u64;
        assert!(before.0.iter().any(|range| range.0 <= from && from < range.1));
        // SAFETY: the range was mapped above and nothing points into it.
        assert_eq!(unsafe { libc::munmap(from as *mut c_void, page) }, 0);
        let hole = (from, from + page as u64);
        occupy(hole).expect("free");
        assert!(occupy(hole).expect_err("taken").contains("could not be kept free"));
        let after = ranges(&fs::read_to_string("/proc/self/maps").expect("maps"), |_| true);
        assert!(free_parts(hole, &after).is_empty());
        // SAFETY: as above.
        unsafe { libc::munmap(start, page * 3) };
    }
}
