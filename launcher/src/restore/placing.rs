//! Memory that ckpt-run writes into the restored processes, from the store, on all cores. CRIU would read it from images in
//! memory, on one core for each process: the pages would be in memory twice for a while, and copied twice.
//!
//! ```text
//!   before CRIU:   the pages are taken out of CRIU's pagemaps and images
//!   post-restore:  the processes have their mappings, and do not run yet: the pages are read, verified and written
//! ```
//!
//! Only private memory without a file is written, in runs of at least [`LEAST_BYTES`]. What several processes have at the same
//! addresses is left to CRIU: they may share the pages since one has forked the other, and would each have a copy.

use crate::criu::{ImageError, Mappings, PageEntry, Pages, rseq_areas};
use crate::files::sources::StagedFile;
use crate::files::staging::StagedDir;
use crate::namespace::processes_of_namespace;
use crate::sys::process_memory::{self, PAGE_BYTES, overlaps, shared_addresses};
use ckpt_snapshot::{RelPath, Target};
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::ops::Range;

/// Smaller runs are left to CRIU.
const LEAST_BYTES: u64 = 256 << 10;

/// The memory of all processes that is written by ckpt-run.
#[derive(Default)]
pub struct Placing {
    /// By the path of the image of pages in the snapshot.
    images: BTreeMap<String, Image>,
}

/// An image of pages that goes to two places.
struct Image {
    /// PID in the job's namespace.
    pid: i32,
    /// In the order of the image, without gaps.
    parts: Vec<Part>,
}

/// A part of an image of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Part {
    /// Where it begins in the snapshot's image.
    offset: u64,
    bytes: u64,
    to: Place,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// An offset in the image that CRIU reads.
    Image(u64),
    /// An address in the process.
    Memory(u64),
}

impl Placing {
    /// Decides what ckpt-run writes of the processes whose images are in `dir`, and takes it out of their pagemaps. `bytes_of`
    /// gives the length of an image of pages in the snapshot, by its path.
    ///
    /// # Errors
    /// When an image cannot be read or written.
    pub fn plan(dir: &StagedDir, bytes_of: impl Fn(&str) -> Option<u64>) -> Result<Self, ImageError> {
        let read = |name: &str| dir.read(name);
        let mut rseq = rseq_areas(&read)?;
        let mut found = BTreeMap::new();
        for (name, _) in dir.files().map_err(|source| ImageError::Io { name: "images".into(), source })? {
            let pid = name.strip_prefix("pagemap-").and_then(|rest| rest.strip_suffix(".img"));
            let Some(pid) = pid.and_then(|pid| pid.parse().ok()) else { continue };
            let io = |source| ImageError::Io { name: name.clone(), source };
            let Some(pages) = read(&name).map_err(io)?.and_then(|image| Pages::parse(&image)) else {
                continue;
            };
            found.insert(pid, (name, pages, Mappings::read(&read, pid)?));
        }
        let shared = shared_addresses(found.values().flat_map(|(_, _, mappings)| &mappings.all));
        let mut images = BTreeMap::new();
        for (pid, (name, pages, mappings)) in &found {
            let path = format!("images/pages-{}.img", pages.pages_id);
            let plain = mappings.plain.iter().filter(|range| !overlaps(&shared, range));
            // The kernel has written there since CRIU has registered it.
            let plain = without(plain, &rseq.remove(pid).unwrap_or_default());
            let (left, parts) = split(&pages.entries, &plain);
            let is_all_for_criu = parts.iter().all(|part| matches!(part.to, Place::Image(_)));
            if is_all_for_criu || bytes_of(&path) != Some(parts.iter().map(|part| part.bytes).sum()) {
                continue;
            }
            let write = || -> io::Result<()> {
                let image = Pages { pages_id: pages.pages_id, entries: left }.image();
                dir.create(name)?.write_all(&image.ok_or(io::ErrorKind::InvalidData)?)
            };
            write().map_err(|source| ImageError::Io { name: name.clone(), source })?;
            images.insert(path, Image { pid: *pid, parts });
        }
        Ok(Self { images })
    }

    /// How much ckpt-run writes, bytes.
    pub fn bytes(&self) -> u64 {
        let parts = self.images.values().flat_map(|image| &image.parts);
        parts.filter(|part| matches!(part.to, Place::Memory(_))).map(|part| part.bytes).sum()
    }

    /// What CRIU reads of an image of pages; `None` if that is all of it.
    pub fn for_criu<'a>(&'a self, path: &RelPath, dir: &'a StagedDir, name: String) -> Option<ForCriu<'a>> {
        let image = self.images.get(path.as_str())?;
        let sizes =
            image.parts.iter().filter(|part| matches!(part.to, Place::Image(_))).map(|part| part.bytes);
        let bytes = sizes.sum();
        Some(ForCriu { parts: &image.parts, file: StagedFile::new(dir, name, bytes), bytes })
    }

    /// What is written into the processes, with the paths of the images of pages. They have to have their mappings, and not to
    /// run. `init_pid` is that of their PID namespace, here.
    ///
    /// # Errors
    /// When a process is not there.
    pub fn for_processes(&self, init_pid: i32) -> io::Result<Vec<(RelPath, ForProcess<'_>)>> {
        let all = processes_of_namespace(init_pid);
        let host_pids: BTreeMap<_, _> = all.into_iter().map(|(host_pid, pid)| (pid, host_pid)).collect();
        let mut found = Vec::new();
        for (path, image) in &self.images {
            let missing = || io::Error::other(format!("CRIU has not restored process {}", image.pid));
            let host_pid = *host_pids.get(&image.pid).ok_or_else(missing)?;
            let path = RelPath::new(path.clone()).map_err(io::Error::other)?;
            found.push((path, ForProcess { parts: &image.parts, host_pid }));
        }
        Ok(found)
    }
}

/// Ranges without the pages in which these areas are.
fn without<'a>(ranges: impl Iterator<Item = &'a Range<u64>>, areas: &[Range<u64>]) -> Vec<Range<u64>> {
    let page = |address: u64| address / PAGE_BYTES * PAGE_BYTES;
    let mut pages: Vec<_> =
        areas.iter().map(|area| page(area.start)..page(area.end - 1) + PAGE_BYTES).collect();
    pages.sort_by_key(|pages| pages.start);
    let mut left = Vec::new();
    for range in ranges {
        let mut start = range.start;
        for taken in pages.iter().filter(|taken| taken.start < range.end && range.start < taken.end) {
            if start < taken.start {
                left.push(start..taken.start);
            }
            start = start.max(taken.end);
        }
        if start < range.end {
            left.push(start..range.end);
        }
    }
    left
}

/// Splits the pages of a process: what is left to CRIU, and where each part of the image goes. `plain` are mappings whose pages
/// are written by ckpt-run.
fn split(entries: &[PageEntry], plain: &[Range<u64>]) -> (Vec<PageEntry>, Vec<Part>) {
    let (mut left, mut parts) = (Vec::new(), Vec::<Part>::new());
    let (mut offset, mut offset_of_criu) = (0, 0);
    for entry in entries {
        let mut start = entry.range.start;
        while start < entry.range.end {
            let next = plain.partition_point(|range| range.end <= start);
            let within = plain.get(next).filter(|range| range.start <= start);
            let bound = within
                .map_or_else(|| plain.get(next).map_or(u64::MAX, |range| range.start), |range| range.end);
            let range = start..entry.range.end.min(bound);
            let bytes = range.end - range.start;
            let is_placed = entry.is_present && within.is_some() && bytes >= LEAST_BYTES;
            if !is_placed {
                left.push(entry.part(range.clone()));
            }
            if entry.is_present {
                let to = if is_placed { Place::Memory(start) } else { Place::Image(offset_of_criu) };
                parts.push(Part { offset, bytes, to });
                offset += bytes;
                offset_of_criu += if is_placed { 0 } else { bytes };
            }
            start = range.end;
        }
    }
    (left, parts)
}

/// The parts that overlap a range of an image of pages: each with its place and where it is in the range.
fn parts_in(parts: &[Part], offset: u64, bytes: u64) -> impl Iterator<Item = (Place, Range<usize>)> {
    let end = offset + bytes;
    let first = parts.partition_point(|part| part.offset + part.bytes <= offset);
    parts[first..].iter().take_while(move |part| part.offset < end).map(move |part| {
        let (start, stop) = (part.offset.max(offset), (part.offset + part.bytes).min(end));
        let moved = start - part.offset;
        let to = match part.to {
            Place::Image(at) => Place::Image(at + moved),
            Place::Memory(at) => Place::Memory(at + moved),
        };
        (to, (start - offset) as usize..(stop - offset) as usize)
    })
}

/// The part of an image of pages that CRIU reads.
pub struct ForCriu<'a> {
    parts: &'a [Part],
    file: StagedFile<'a>,
    bytes: u64,
}

impl Target for ForCriu<'_> {
    fn set_bytes(&self, _: u64) -> io::Result<()> {
        self.file.set_bytes(self.bytes)
    }

    fn wants(&self, range: Range<u64>) -> bool {
        let mut parts = parts_in(self.parts, range.start, range.end - range.start);
        parts.any(|(to, _)| matches!(to, Place::Image(_)))
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        for (to, range) in parts_in(self.parts, offset, bytes.len() as u64) {
            if let Place::Image(at) = to {
                self.file.write_at(at, &bytes[range])?;
            }
        }
        Ok(())
    }
}

/// The part of an image of pages that ckpt-run writes into the process.
pub struct ForProcess<'a> {
    parts: &'a [Part],
    host_pid: i32,
}

impl Target for ForProcess<'_> {
    /// What another tier has delivered before was verified: this one delivers the same.
    fn set_bytes(&self, _: u64) -> io::Result<()> {
        Ok(())
    }

    fn wants(&self, range: Range<u64>) -> bool {
        let mut parts = parts_in(self.parts, range.start, range.end - range.start);
        parts.any(|(to, _)| matches!(to, Place::Memory(_)))
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let parts = parts_in(self.parts, offset, bytes.len() as u64).filter_map(|(to, range)| match to {
            Place::Memory(address) => Some((address, &bytes[range])),
            Place::Image(_) => None,
        });
        process_memory::write(self.host_pid, &parts.collect::<Vec<_>>()).map_err(|error| {
            match error.raw_os_error() {
                Some(libc::ESRCH) => io::Error::other(
                    "the process was killed while its memory was written. The kernel does that when the machine, or the memory limit of the cgroup, has no memory left",
                ),
                _ => error,
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::staging::Staging;

    const PAGE: u64 = 4096;
    const MIB: u64 = 1 << 20;

    #[test]
    fn each_page_goes_to_one_place() {
        // A small run, one that is partly plain, one without pages in the image, and one that is plain.
        let entries = [
            PageEntry::new(0..PAGE, true),
            PageEntry::new(MIB..3 * MIB, true),
            PageEntry::new(4 * MIB..5 * MIB, false),
            PageEntry::new(8 * MIB..9 * MIB, true),
            PageEntry::new(9 * MIB..9 * MIB + PAGE, true),
        ];
        let plain = [0..PAGE, 2 * MIB..5 * MIB, 8 * MIB..10 * MIB];
        let (left, parts) = split(&entries, &plain);
        let left: Vec<_> = left.into_iter().map(|entry| entry.range).collect();
        assert_eq!(left, [0..PAGE, MIB..2 * MIB, 4 * MIB..5 * MIB, 9 * MIB..9 * MIB + PAGE]);
        let part = |offset, bytes, to| Part { offset, bytes, to };
        let expected = [
            part(0, PAGE, Place::Image(0)),
            part(PAGE, MIB, Place::Image(PAGE)),
            part(PAGE + MIB, MIB, Place::Memory(2 * MIB)),
            part(PAGE + 2 * MIB, MIB, Place::Memory(8 * MIB)),
            part(PAGE + 3 * MIB, PAGE, Place::Image(PAGE + MIB)),
        ];
        assert_eq!(parts, expected);
        let found: Vec<_> = parts_in(&parts, MIB, MIB + 2 * PAGE).collect();
        let page = PAGE as usize;
        let expected = [
            (Place::Image(MIB), 0..page),
            (Place::Memory(2 * MIB), page..page + MIB as usize),
            (Place::Memory(8 * MIB), page + MIB as usize..2 * page + MIB as usize),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn pages_with_an_area_of_the_kernel_are_left_out() {
        let ranges = [0..4 * PAGE, 8 * PAGE..16 * PAGE];
        let areas = [9 * PAGE + 100..9 * PAGE + 132, 16 * PAGE - 32..16 * PAGE, PAGE - 8..PAGE + 24];
        let left = without(ranges.iter(), &areas);
        assert_eq!(left, [2 * PAGE..4 * PAGE, 8 * PAGE..9 * PAGE, 10 * PAGE..15 * PAGE]);
        assert_eq!(without(ranges.iter(), &[]), ranges);
    }

    #[test]
    fn criu_gets_its_part_of_an_image() {
        let dir = tempfile::tempdir().unwrap();
        let staging = Staging::on_disk(&dir.path().join("staging")).unwrap();
        let staged = staging.subdir("images").unwrap();
        let parts = vec![
            Part { offset: 0, bytes: 2, to: Place::Image(0) },
            Part { offset: 2, bytes: 3, to: Place::Memory(0x1000) },
            Part { offset: 5, bytes: 3, to: Place::Image(2) },
        ];
        let path = RelPath::new("images/pages-1.img").unwrap();
        let images = BTreeMap::from([(path.to_string(), Image { pid: 1, parts })]);
        let placing = Placing { images };
        assert_eq!(placing.bytes(), 3);
        let target = placing.for_criu(&path, &staged, "pages-1.img".into()).unwrap();
        target.set_bytes(8).unwrap();
        assert_eq!([0..2, 1..3, 2..5, 4..6].map(|range| target.wants(range)), [true, true, false, true]);
        target.write_at(0, b"abc").unwrap();
        target.write_at(4, b"efgh").unwrap();
        assert_eq!(staged.read("pages-1.img").unwrap().unwrap(), b"abfgh");
        assert!(
            placing.for_criu(&RelPath::new("images/pages-2.img").unwrap(), &staged, String::new()).is_none()
        );
        let parts = &placing.images[path.as_str()].parts;
        let process = ForProcess { parts, host_pid: 0 };
        assert_eq!([0..2, 1..3, 2..5, 5..8].map(|range| process.wants(range)), [false, true, true, false]);
    }
}
