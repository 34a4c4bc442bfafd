//! Copies of the memory of the job's processes, which ckpt-run makes on all cores while the job is paused. CRIU copies one
//! process after the other, on one core, through pipes; it saves everything else.
//!
//! ```text
//!   the job runs:    memory for the copies is allocated
//!   it is paused:    its pages are copied (CRIU waits) ──► the library in CRIU leaves them out
//!   CRIU is done:    the pages are added to its pagemaps, and the job goes on; the store reads one image of pages per process
//! ```
//!
//! Only private memory without a file, in mappings of at least [`LEAST_BYTES`], is copied, and only if all of a process can be
//! read, and it has no asynchronous I/O. CRIU copies the rest. What several processes have at the same addresses, and all of
//! those of which one has forked the other, is read in a way that leaves pages shared, unless the kernel says that no other
//! process has them.

use crate::checkpoint::precopy::MergedPages;
use crate::criu::Merged;
use crate::criu::library::CopiedPages;
use crate::files::staging::{StagedDir, Staging};
use crate::namespace::{Tree, processes};
use crate::sys::path_text::read_maps;
use crate::sys::process_memory::{CopyBuffer, MOST_RANGES, PageTable, overlaps, shared_addresses};
use crate::sys::threads::on_all_cores;
use parking_lot::Mutex;
use procfs_core::FromRead as _;
use procfs_core::process::{MMPermissions, MMapPath, MemoryMap, Stat};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::io::{self, Write};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

/// Of smaller mappings there are many, with little in them.
const LEAST_BYTES: u64 = 1 << 20;
/// What a thread copies at once.
const STEP_BYTES: u64 = 4 << 20;
/// What a thread allocates at once.
const ALLOCATION_BYTES: u64 = 64 << 20;
/// See [`Step::is_exclusive`].
const RANGES_LOOKED_AT: usize = 64;
/// A job may have more memory when it is paused: a part of it is allocated in advance, too.
const GROWTH_PART: u64 = 32;

/// Copies are of no use to the CRIU of this launcher.
static IS_OFF: AtomicBool = AtomicBool::new(false);

/// The copies of one checkpoint.
pub(super) struct HostMemory {
    /// Its name in the staging.
    name: String,
    dir: StagedDir,
    /// By PID in the job's namespace.
    copies: BTreeMap<i32, Copied>,
    /// What was allocated in advance, bytes.
    allocated_bytes: u64,
}

/// The copy of the memory of a process.
struct Copied {
    /// Its file, in the directory.
    name: String,
    /// Where it is copied to; `None` once the copy is complete.
    buffer: Option<CopyBuffer>,
    /// The addresses of its pages, which are in this order in the file.
    pages: Vec<Range<u64>>,
}

/// What is copied of a process.
struct Wanted {
    host_pid: i32,
    pid: i32,
    /// /proc/PID/mem, if anything is read from it.
    memory: Option<File>,
    table: PageTable,
    mappings: Vec<Mapping>,
}

struct Mapping {
    range: Range<u64>,
    /// The process may share these pages with another one.
    is_shared: bool,
    pages: Vec<Range<u64>>,
}

/// What a thread copies at once.
struct Step<'a> {
    of: &'a Wanted,
    buffer: &'a CopyBuffer,
    is_shared: bool,
    pages: Vec<Range<u64>>,
    offset: u64,
}

impl HostMemory {
    /// Allocates memory for copies, while the job runs. `None` if there is nothing to copy.
    ///
    /// # Errors
    /// When there is not enough memory.
    pub(super) fn allocate(staging: &Staging, name: &str, tree: Tree) -> io::Result<Option<Self>> {
        if Self::is_off() || !staging.is_in_memory() {
            return Ok(None);
        }
        let found = Wanted::of_all(tree);
        if found.is_empty() {
            return Ok(None);
        }
        let dir = staging.subdir(name)?;
        let mut all = Self { name: name.to_owned(), dir, copies: BTreeMap::new(), allocated_bytes: 0 };
        for wanted in found {
            let bytes = wanted.bytes();
            match Copied::new(&all.dir, wanted.pid, bytes + bytes / GROWTH_PART) {
                Ok(copied) => drop(all.copies.insert(wanted.pid, copied)),
                Err(error) => {
                    all.discard(staging);
                    return Err(error);
                }
            }
        }
        let parts: Vec<_> = all.copies.values().flat_map(Copied::parts).collect();
        let allocated_bytes = AtomicU64::new(0);
        on_all_cores(&parts, |(buffer, part)| match buffer.allocate(part.clone()) {
            Ok(()) => drop(allocated_bytes.fetch_add(part.end - part.start, Ordering::Relaxed)),
            // It is allocated while the job is paused.
            Err(error) => tracing::debug!("memory could not be allocated in advance: {error}"),
        });
        drop(parts);
        all.allocated_bytes = allocated_bytes.into_inner();
        Ok(Some(all))
    }

    /// What was allocated in advance, bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.allocated_bytes
    }

    /// Copies the memory of the job, which is paused. Returns what was copied until the deadline.
    pub(super) fn copy(&mut self, tree: Tree, deadline: Instant) -> Vec<CopiedPages> {
        let begun = Instant::now();
        // Those of a try that has failed.
        self.copies.values_mut().for_each(|copied| copied.pages.clear());
        let mut all = Wanted::of_all(tree);
        // A process that is new, or has grown.
        all.retain(|wanted| self.make_room(wanted.pid, wanted.bytes()).is_ok());
        let steps: Vec<_> = all.iter().flat_map(|wanted| self.steps(wanted)).collect();
        let failed = Mutex::new(BTreeSet::new());
        on_all_cores(&steps, |step| {
            if failed.lock().contains(&step.of.pid) {
                return;
            }
            let memory = step.of.memory.as_ref().filter(|_| step.is_shared && !step.is_exclusive());
            let copied = match (Instant::now() < deadline, memory) {
                (true, None) => step.buffer.copy(step.of.host_pid, &step.pages, step.offset),
                (true, Some(memory)) => step.buffer.copy_shared(memory, &step.pages, step.offset),
                (false, _) => Err(io::ErrorKind::TimedOut.into()),
            };
            if let Err(error) = copied
                && failed.lock().insert(step.of.pid)
            {
                tracing::debug!("the memory of process {} is left to CRIU: {error}", step.of.pid);
            }
        });
        drop(steps);
        let failed = failed.into_inner();
        let mut found = Vec::new();
        for wanted in all.into_iter().filter(|wanted| !failed.contains(&wanted.pid)) {
            let Some(copied) = self.copies.get_mut(&wanted.pid) else { continue };
            for mapping in wanted.mappings {
                found.push((wanted.pid, mapping.range));
                copied.pages.extend(mapping.pages);
            }
        }
        self.free_unused();
        let bytes: u64 = self.copies.values().map(|copied| bytes(&copied.pages)).sum();
        tracing::debug!("copying {bytes} bytes of memory took {} µs", begun.elapsed().as_micros());
        found
    }

    /// Frees what nothing was copied to: CRIU needs memory for these processes.
    fn free_unused(&mut self) {
        let dir = &self.dir;
        self.copies.retain(|_, copied| {
            let is_used = !copied.pages.is_empty();
            if !is_used && let Err(error) = dir.remove(&copied.name) {
                tracing::debug!("cannot free memory for copies: {error}");
            }
            is_used
        });
    }

    /// Makes sure that so much of a process can be copied.
    fn make_room(&mut self, pid: i32, bytes: u64) -> io::Result<()> {
        match self.copies.get_mut(&pid) {
            Some(copied) => copied.grow(&self.dir, bytes),
            None => {
                self.copies.insert(pid, Copied::new(&self.dir, pid, bytes)?);
                Ok(())
            }
        }
    }

    fn steps<'a>(&'a self, wanted: &'a Wanted) -> Vec<Step<'a>> {
        let buffer = self.copies.get(&wanted.pid).and_then(|copied| copied.buffer.as_ref());
        let Some(buffer) = buffer else { return Vec::new() };
        let mut offset = 0;
        let mut steps = Vec::new();
        for Mapping { is_shared, pages, .. } in &wanted.mappings {
            for pages in steps_of(pages) {
                let bytes = bytes(&pages);
                steps.push(Step { of: wanted, buffer, is_shared: *is_shared, pages, offset });
                offset += bytes;
            }
        }
        steps
    }

    /// Adds the copied pages to the pagemaps of `images`. Returns the images of pages, by their names.
    ///
    /// # Errors
    /// When CRIU has copied one of them, too. Nothing is copied from then on.
    pub(super) fn merge(&self, images: &StagedDir) -> io::Result<HashMap<String, MergedPages>> {
        let mut found = HashMap::new();
        for (pid, copied) in &self.copies {
            let pagemap = format!("pagemap-{pid}.img");
            let wrong = || {
                if !IS_OFF.swap(true, Ordering::Relaxed) {
                    tracing::warn!(
                        "CRIU copies memory that ckpt-run has copied, too: it is left to CRIU from now on, which takes several times as long"
                    );
                }
                io::Error::other(format!("{pagemap} does not fit what was copied"))
            };
            let of_criu = images.read(&pagemap)?.ok_or_else(wrong)?;
            let merged = Merged::with_copied(&of_criu, &copied.pages).ok_or_else(wrong)?;
            images.create(&pagemap)?.write_all(&merged.image)?;
            let name = merged.pages_ids.first().map(|id| format!("pages-{id}.img")).ok_or_else(wrong)?;
            let names = vec![name.clone(), copied.name.clone()];
            found.insert(name, MergedPages { names, pieces: merged.pieces });
        }
        Ok(found)
    }

    /// Nothing is copied to it any more: its memory is freed as it is stored.
    pub(super) fn finish(&mut self) {
        self.copies.values_mut().for_each(|copied| copied.buffer = None);
    }

    /// Whether nothing is copied any more.
    fn is_off() -> bool {
        IS_OFF.load(Ordering::Relaxed)
    }

    /// Deletes what was to be copied, since this CRIU cannot leave it out. Nothing is copied from then on.
    pub(super) fn give_up(&mut self) {
        IS_OFF.store(true, Ordering::Relaxed);
        self.free_unused();
    }

    /// Whether CRIU has copied what was copied here.
    pub(super) fn is_doubtful(&self) -> bool {
        Self::is_off() && !self.copies.is_empty()
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
        let buffer = Some(CopyBuffer::new(&dir.resize(&name, bytes)?, bytes)?);
        Ok(Self { name, buffer, pages: Vec::new() })
    }

    /// Room for so much at least. What was allocated stays.
    fn grow(&mut self, dir: &StagedDir, bytes: u64) -> io::Result<()> {
        let buffer = self.buffer.as_mut().ok_or(io::ErrorKind::InvalidInput)?;
        if buffer.bytes() < bytes {
            *buffer = CopyBuffer::new(&dir.resize(&self.name, bytes)?, bytes)?;
        }
        Ok(())
    }

    /// The parts of its buffer that are allocated at once.
    fn parts(&self) -> impl Iterator<Item = (&CopyBuffer, Range<u64>)> {
        self.buffer.iter().flat_map(|buffer| {
            let end = buffer.bytes();
            let starts = (0..end).step_by(ALLOCATION_BYTES as usize);
            starts.map(move |start| (buffer, start..end.min(start + ALLOCATION_BYTES)))
        })
    }
}

impl Wanted {
    /// What is copied of all processes that have anything to copy, and can be looked at.
    fn of_all(tree: Tree) -> Vec<Self> {
        let maps =
            |(host_pid, pid)| Some((host_pid, pid, read_maps(format!("/proc/{host_pid}/maps")).ok()?.0));
        let all: Vec<_> = processes(tree).into_iter().filter_map(maps).collect();
        let ranges: Vec<_> = all.iter().flat_map(|(.., maps)| maps.iter().map(range)).collect();
        let shared = shared_addresses(ranges.iter());
        let relatives = relatives(all.iter().map(|(host_pid, ..)| *host_pid));
        let wanted = |(host_pid, pid, maps): &(i32, i32, Vec<MemoryMap>)| {
            let shared = (!relatives.contains(host_pid)).then_some(&shared[..]);
            let one = Self::of(*host_pid, *pid, maps, shared);
            let failed = |error: &io::Error| tracing::debug!("process {pid} is left to CRIU: {error}");
            one.inspect_err(failed).ok().filter(|one| one.bytes() > 0)
        };
        all.iter().filter_map(wanted).collect()
    }

    /// What is at the addresses `shared` may be shared; everything, if there are none.
    fn of(host_pid: i32, pid: i32, maps: &[MemoryMap], shared: Option<&[Range<u64>]>) -> io::Result<Self> {
        // A device may write to its memory while the job is paused, and CRIU reads last what the device says of that.
        let has_aio = maps.iter().any(is_aio);
        let table = PageTable::open(host_pid)?;
        let mut mappings = Vec::new();
        for range in maps.iter().filter(|map| !has_aio && is_copied(map)).map(range) {
            let pages = table.present(range.clone())?;
            let is_shared = shared.is_none_or(|shared| overlaps(shared, &range));
            mappings.push(Mapping { is_shared, range, pages });
        }
        let memory = mappings.iter().any(|mapping| mapping.is_shared);
        let memory = memory.then(|| File::open(format!("/proc/{host_pid}/mem"))).transpose()?;
        Ok(Self { host_pid, pid, memory, table, mappings })
    }

    fn bytes(&self) -> u64 {
        self.mappings.iter().map(|mapping| bytes(&mapping.pages)).sum()
    }
}

fn range(map: &MemoryMap) -> Range<u64> {
    map.address.0..map.address.1
}

/// The processes of which one has forked another, which has not executed a program since: they have the same first stack. They
/// may share pages at different addresses, too, if one has moved its memory (mremap).
fn relatives(pids: impl Iterator<Item = i32>) -> BTreeSet<i32> {
    let mut by_stack: BTreeMap<Option<u64>, Vec<i32>> = BTreeMap::new();
    for pid in pids {
        let stack = Stat::from_file(format!("/proc/{pid}/stat")).ok().map(|stat| stat.startstack);
        by_stack.entry(stack.filter(|stack| *stack != 0)).or_default().push(pid);
    }
    by_stack.into_values().filter(|pids| pids.len() > 1).flatten().collect()
}

impl Step<'_> {
    /// Whether no other process has these pages. To look at very many ranges takes longer than the other way to read them.
    fn is_exclusive(&self) -> bool {
        self.pages.len() <= RANGES_LOOKED_AT && self.of.table.are_exclusive(&self.pages)
    }
}

/// A context of asynchronous I/O (io_setup).
fn is_aio(map: &MemoryMap) -> bool {
    matches!(&map.pathname, MMapPath::Path(path) if path.as_os_str().as_encoded_bytes().starts_with(b"/[aio]"))
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

/// Pages in the steps in which they are copied.
fn steps_of(pages: &[Range<u64>]) -> Vec<Vec<Range<u64>>> {
    let mut steps: Vec<Vec<Range<u64>>> = Vec::new();
    let mut left_bytes = 0;
    for range in pages {
        let mut start = range.start;
        while start < range.end {
            if left_bytes == 0 || steps.last().is_none_or(|step| step.len() == MOST_RANGES) {
                steps.push(Vec::new());
                left_bytes = STEP_BYTES;
            }
            let end = range.end.min(start + left_bytes);
            if let Some(step) = steps.last_mut() {
                step.push(start..end);
            }
            (left_bytes, start) = (left_bytes - (end - start), end);
        }
    }
    steps
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
        assert!(steps.iter().all(|step| step.len() <= MOST_RANGES && bytes(step) <= STEP_BYTES));
        let mut joined: Vec<Range<u64>> = Vec::new();
        for range in steps.into_iter().flatten() {
            match joined.last_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                _ => joined.push(range),
            }
        }
        assert_eq!(joined, pages);
    }
}
