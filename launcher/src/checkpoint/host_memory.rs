//! Copies of the memory of the job's processes, which ckpt-run makes on all cores while the job is paused. CRIU copies one
//! process after the other, on one core, through pipes; it saves everything else.
//!
//! ```text
//!   the job runs:    memory for the copies is allocated
//!   it is paused:    its pages are copied (CRIU waits) ──► the library in CRIU leaves them out
//!   after the dump:  the pages are added to CRIU's pagemaps; the store reads one image of pages per process
//! ```
//!
//! Only private memory without a file, in mappings of at least [`LEAST_BYTES`], is copied, and only if all of a process can be
//! read. CRIU copies the rest.

use crate::checkpoint::precopy::MergedPages;
use crate::criu::Merged;
use crate::criu::library::CopiedPages;
use crate::files::staging::{StagedDir, Staging};
use crate::namespace::{Tree, processes};
use crate::sys::path_text::read_maps;
use crate::sys::process_memory::{CopyBuffer, MOST_RANGES, PageTable};
use parking_lot::Mutex;
use procfs_core::process::{MMPermissions, MMapPath, MemoryMap};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::{self, Write};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// Of smaller mappings there are many, with little in them.
const LEAST_BYTES: u64 = 1 << 20;
/// What a thread copies at once.
const STEP_BYTES: u64 = 4 << 20;
/// What a thread allocates at once.
const ALLOCATION_BYTES: u64 = 64 << 20;
/// More threads are not faster.
const MOST_THREADS: usize = 16;
/// A job may have more memory when it is paused: a part of it is allocated in advance, too.
const GROWTH_PART: u64 = 32;

/// The copies of one checkpoint.
pub(super) struct HostMemory {
    /// Its name in the staging.
    name: String,
    dir: StagedDir,
    /// By PID in the job's namespace.
    copies: BTreeMap<i32, Copied>,
}

/// The copy of the memory of a process.
struct Copied {
    /// Its file, in the directory.
    name: String,
    /// `None` once the copy is complete.
    buffer: Option<CopyBuffer>,
    /// The addresses of its pages, which are in this order in the file.
    pages: Vec<Range<u64>>,
}

/// What is copied of a process.
struct Wanted {
    mappings: Vec<Range<u64>>,
    pages: Vec<Range<u64>>,
}

/// What a thread copies at once.
struct Step<'a> {
    host_pid: i32,
    pid: i32,
    pages: Vec<Range<u64>>,
    buffer: &'a CopyBuffer,
    offset: u64,
}

impl HostMemory {
    /// Allocates memory for copies, while the job runs. `None` if there is nothing to copy.
    ///
    /// # Errors
    /// When there is not enough memory.
    pub(super) fn allocate(staging: &Staging, name: &str, tree: Tree) -> io::Result<Option<Self>> {
        let found: Vec<_> = processes(tree)
            .into_iter()
            .filter_map(|(host_pid, pid)| Some((pid, bytes(&Wanted::of(host_pid).ok()?.pages))))
            .filter(|(_, bytes)| *bytes > 0)
            .collect();
        if found.is_empty() || !staging.is_in_memory() {
            return Ok(None);
        }
        let dir = staging.subdir(name)?;
        let mut copies = BTreeMap::new();
        for (pid, bytes) in found {
            copies.insert(pid, Copied::new(&dir, pid, bytes + bytes / GROWTH_PART)?);
        }
        let parts: Vec<_> = copies.values().flat_map(Copied::parts).collect();
        on_all_cores(&parts, |(buffer, part)| {
            // Otherwise it is allocated while the job is paused.
            if let Err(error) = buffer.allocate(part.clone()) {
                tracing::debug!("memory for the job's memory could not be allocated in advance: {error}");
            }
        });
        Ok(Some(Self { name: name.to_owned(), dir, copies }))
    }

    /// What was allocated in advance, bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.copies.values().filter_map(|copied| Some(copied.buffer.as_ref()?.bytes())).sum()
    }

    /// Copies the memory of the job, which is paused. Returns what was copied until the deadline.
    pub(super) fn copy(&mut self, tree: Tree, deadline: Instant) -> Vec<CopiedPages> {
        let begun = Instant::now();
        let wanted: Vec<_> = processes(tree)
            .into_iter()
            .filter_map(|(host_pid, pid)| {
                let wanted = Wanted::of(host_pid).ok().filter(|wanted| !wanted.pages.is_empty())?;
                // A process that is new, or has grown.
                self.make_room(pid, bytes(&wanted.pages)).ok()?;
                Some((host_pid, pid, wanted))
            })
            .collect();
        let mut steps = Vec::new();
        for (host_pid, pid, wanted) in &wanted {
            if let Some(buffer) = self.copies.get(pid).and_then(|copied| copied.buffer.as_ref()) {
                let each = steps_of(&wanted.pages).into_iter();
                steps.extend(each.map(|(pages, offset)| Step {
                    host_pid: *host_pid,
                    pid: *pid,
                    pages,
                    buffer,
                    offset,
                }));
            }
        }
        let failed = Mutex::new(BTreeSet::new());
        on_all_cores(&steps, |step| {
            if failed.lock().contains(&step.pid) {
                return;
            }
            let copied = match Instant::now() < deadline {
                true => step.buffer.copy(step.host_pid, &step.pages, step.offset),
                false => Err(io::ErrorKind::TimedOut.into()),
            };
            if let Err(error) = copied
                && failed.lock().insert(step.pid)
            {
                tracing::debug!("the memory of process {} is left to CRIU: {error}", step.pid);
            }
        });
        drop(steps);
        let failed = failed.into_inner();
        let mut all = Vec::new();
        for (_, pid, wanted) in wanted {
            let Some(copied) = self.copies.get_mut(&pid).filter(|_| !failed.contains(&pid)) else { continue };
            all.extend(wanted.mappings.into_iter().map(|mapping| (pid, mapping)));
            copied.pages = wanted.pages;
        }
        let bytes: u64 = self.copies.values().map(|copied| bytes(&copied.pages)).sum();
        tracing::debug!("copying {bytes} bytes of memory took {} µs", begun.elapsed().as_micros());
        all
    }

    /// Makes sure that so much of a process can be copied.
    fn make_room(&mut self, pid: i32, bytes: u64) -> io::Result<()> {
        let buffer = self.copies.get(&pid).and_then(|copied| copied.buffer.as_ref());
        if buffer.is_none_or(|buffer| buffer.bytes() < bytes) {
            self.copies.insert(pid, Copied::new(&self.dir, pid, bytes)?);
        }
        Ok(())
    }

    /// Adds the copied pages to the pagemaps of `images`. Returns the images of pages, by their names.
    pub(super) fn merge(&mut self, images: &StagedDir) -> io::Result<HashMap<String, MergedPages>> {
        let mut found = HashMap::new();
        for (pid, copied) in &mut self.copies {
            copied.buffer = None;
            if copied.pages.is_empty() {
                self.dir.remove(&copied.name)?;
                continue;
            }
            let pagemap = format!("pagemap-{pid}.img");
            let wrong = || io::Error::other(format!("{pagemap} does not fit what was copied"));
            let of_criu = images.read(&pagemap)?.ok_or_else(wrong)?;
            let merged = Merged::with_copied(&of_criu, &copied.pages).ok_or_else(wrong)?;
            images.create(&pagemap)?.write_all(&merged.image)?;
            let name = merged.pages_ids.first().map(|id| format!("pages-{id}.img")).ok_or_else(wrong)?;
            let names = vec![name.clone(), copied.name.clone()];
            found.insert(name, MergedPages { names, pieces: merged.pieces });
        }
        Ok(found)
    }

    /// Deletes what was copied.
    pub(super) fn discard(self, staging: &Staging) {
        if let Err(error) = staging.remove_subdir(&self.name) {
            tracing::debug!("cannot remove copies of memory: {error}");
        }
    }

    /// Where the copies are.
    pub(super) fn dir(&self) -> &StagedDir {
        &self.dir
    }
}

impl Copied {
    /// Room for so much of a process.
    fn new(dir: &StagedDir, pid: i32, bytes: u64) -> io::Result<Self> {
        let name = pid.to_string();
        let file = dir.create_with(&name, bytes)?;
        let buffer = Some(CopyBuffer::new(&file, bytes)?);
        Ok(Self { name, buffer, pages: Vec::new() })
    }

    /// The parts of its buffer that are allocated at once.
    fn parts(&self) -> impl Iterator<Item = (&CopyBuffer, Range<u64>)> {
        self.buffer.iter().flat_map(|buffer| {
            let starts = (0..buffer.bytes()).step_by(ALLOCATION_BYTES as usize);
            starts.map(move |start| (buffer, start..buffer.bytes().min(start + ALLOCATION_BYTES)))
        })
    }
}

impl Wanted {
    /// By PID here.
    fn of(pid: i32) -> io::Result<Self> {
        let table = PageTable::open(pid)?;
        let maps = read_maps(format!("/proc/{pid}/maps"))?;
        let mappings: Vec<_> = maps.0.iter().filter(|map| is_copied(map)).map(range).collect();
        let mut pages = Vec::new();
        for mapping in &mappings {
            pages.extend(table.present(mapping.clone())?);
        }
        Ok(Self { mappings, pages })
    }
}

fn range(map: &MemoryMap) -> Range<u64> {
    map.address.0..map.address.1
}

/// Whether a mapping is copied here: private memory without a file, which the process can read.
fn is_copied(map: &MemoryMap) -> bool {
    let has_no_file = match &map.pathname {
        MMapPath::Anonymous | MMapPath::Heap => true,
        MMapPath::Other(name) => name.starts_with("anon:"),
        _ => false,
    };
    let range = range(map);
    has_no_file
        && map.inode == 0
        && map.perms.contains(MMPermissions::PRIVATE | MMPermissions::READ)
        && range.end - range.start >= LEAST_BYTES
}

fn bytes(ranges: &[Range<u64>]) -> u64 {
    ranges.iter().map(|range| range.end - range.start).sum()
}

/// Pages in the steps in which they are copied, each with its offset in the copy.
fn steps_of(pages: &[Range<u64>]) -> Vec<(Vec<Range<u64>>, u64)> {
    let mut steps: Vec<(Vec<Range<u64>>, u64)> = Vec::new();
    let (mut offset, mut left_bytes) = (0, 0);
    for range in pages {
        let mut start = range.start;
        while start < range.end {
            if left_bytes == 0 || steps.last().is_none_or(|(step, _)| step.len() == MOST_RANGES) {
                steps.push((Vec::new(), offset));
                left_bytes = STEP_BYTES;
            }
            let end = range.end.min(start + left_bytes);
            if let Some((step, _)) = steps.last_mut() {
                step.push(start..end);
            }
            (offset, left_bytes, start) = (offset + end - start, left_bytes - (end - start), end);
        }
    }
    steps
}

/// Works on all items, each in one of several threads.
fn on_all_cores<T: Sync>(items: &[T], work: impl Fn(&T) + Sync) {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let next = AtomicUsize::new(0);
    let work_on = || {
        while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
            work(item);
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..cores.min(MOST_THREADS).min(items.len()) {
            // Without another thread, this one does the work.
            let _ = std::thread::Builder::new().name("copy".to_owned()).spawn_scoped(scope, work_on);
        }
        work_on();
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_have_all_pages_once_in_order() {
        let page = |number: u64| number * 4096..(number + 1) * 4096;
        let scattered = (0..3000).map(|number| page(2 * number));
        let large = [1 << 30..(1 << 30) + 3 * STEP_BYTES + 4096, 1 << 31..(1 << 31) + 8192];
        let pages: Vec<_> = scattered.chain(large).collect();
        let steps = steps_of(&pages);
        let mut offset = 0;
        for (step, at) in &steps {
            assert!(*at == offset && step.len() <= MOST_RANGES && bytes(step) <= STEP_BYTES);
            offset += bytes(step);
        }
        assert_eq!(offset, bytes(&pages));
        let mut joined: Vec<Range<u64>> = Vec::new();
        for range in steps.into_iter().flat_map(|(step, _)| step) {
            match joined.last_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                _ => joined.push(range),
            }
        }
        assert_eq!(joined, pages);
    }

    #[test]
    fn every_item_is_worked_on_once() {
        for count in [0, 1, 1000] {
            let items: Vec<_> = (0..count).map(|_| AtomicUsize::new(0)).collect();
            on_all_cores(&items, |item| {
                item.fetch_add(1, Ordering::Relaxed);
            });
            assert!(items.iter().all(|item| item.load(Ordering::Relaxed) == 1));
        }
    }
}
