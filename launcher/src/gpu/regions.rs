//! The memory in a snapshot, by what the job knows it by: process, device, address.

use crate::criu::Pagemap;
use crate::gpu::device_memory;
use anyhow::{Context, Result, anyhow};
use ckpt_snapshot::chunk::{CHUNK_BYTES, ChunkId};
use ckpt_snapshot::{DataFile, Manifest, RelPath, Source, Store};
use std::collections::BTreeMap;
use std::fmt;

/// Whose memory it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Owner {
    /// Of a process, on a device.
    Device {
        /// The process, as the job itself sees it.
        pid: u32,
        /// Ordinal of the device.
        device: i32,
    },
    /// Of a process.
    Process(u32),
    /// A segment that processes share, by CRIU's number; its addresses are offsets.
    Shared(u32),
}

impl fmt::Display for Owner {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Device { pid, device } => write!(out, "gpu/{pid}/device-{device}"),
            Self::Process(pid) => write!(out, "host/{pid}"),
            Self::Shared(number) => write!(out, "shared/{number}"),
        }
    }
}

/// A region of memory, and where in the snapshot its content is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryRegion {
    /// Where its owner sees it; `None` for device memory that is mapped nowhere.
    pub address: Option<u64>,
    /// Its length.
    pub bytes: u64,
    /// The data file.
    pub file: RelPath,
    /// Where it begins in the data file.
    pub offset: u64,
}

impl MemoryRegion {
    /// A name that no other region of the same owner has.
    #[must_use]
    pub fn name(&self) -> String {
        match self.address {
            Some(address) => format!("{address:#014x}"),
            None => format!("unmapped-{:#x}", self.offset),
        }
    }
}

/// All memory of a snapshot, by owner, in the order of the addresses.
pub type Memory = BTreeMap<Owner, Vec<MemoryRegion>>;

/// The device memory of a snapshot.
///
/// # Errors
/// Damage.
pub fn of_devices(store: &dyn Store, manifest: &Manifest) -> Result<Memory> {
    let mut all = Memory::new();
    for process in &manifest.gpu {
        let Some(file) = &process.memory else { continue };
        for region in device_memory::read_report(store, manifest, process)?.regions {
            let owner = Owner::Device { pid: process.pid, device: region.device };
            let address = Some(region.address).filter(|&address| address != 0);
            let region =
                MemoryRegion { address, bytes: region.bytes, file: file.clone(), offset: region.offset };
            all.entry(owner).or_default().push(region);
        }
    }
    all.values_mut().for_each(|regions| regions.sort_by_key(|region| (region.address, region.offset)));
    Ok(all)
}

/// The memory of a snapshot's processes that is in it: what they have not touched is not, nor what is in files.
///
/// # Errors
/// Damage, and images that do not read.
pub fn of_processes(store: &dyn Store, manifest: &Manifest) -> Result<Memory> {
    let mut all = Memory::new();
    for file in &manifest.files {
        let Some(owner) = pagemap_of(file.path.as_str()) else { continue };
        let image = store.read(manifest, &file.path)?;
        let pagemap = Pagemap::parse(&image).ok_or_else(|| anyhow!("{} does not read", file.path))?;
        let pages = RelPath::new(format!("images/pages-{}.img", pagemap.pages_id)).context("a plain path")?;
        let mut offset = 0;
        for run in pagemap.runs {
            let bytes = run.end - run.start;
            let region = MemoryRegion { address: Some(run.start), bytes, file: pages.clone(), offset };
            all.entry(owner).or_default().push(region);
            offset += bytes;
        }
    }
    Ok(all)
}

fn pagemap_of(path: &str) -> Option<Owner> {
    let name = path.strip_prefix("images/pagemap-")?.strip_suffix(".img")?;
    match name.strip_prefix("shmem-") {
        Some(number) => number.parse().ok().map(Owner::Shared),
        None => name.parse().ok().map(Owner::Process),
    }
}

/// Reads regions of a data file; a chunk of which several small ones are wanted is read once.
pub struct Reader<'a> {
    source: Box<dyn Source + 'a>,
    /// Where each chunk ends, and its name. None in version 1 of the store.
    chunks: Vec<(u64, ChunkId)>,
    held: Vec<u8>,
    held_from: u64,
}

impl<'a> Reader<'a> {
    /// Of the data file `path`.
    ///
    /// # Errors
    /// Damage.
    pub fn open(store: &'a dyn Store, manifest: &Manifest, path: &RelPath) -> Result<Self> {
        let source = store.source(manifest, path)?;
        let file = manifest.files.iter().find(|file| &file.path == path);
        let mut end = 0;
        let chunks = file.map_or(&[][..], |file: &DataFile| &file.chunks).iter().map(|chunk| {
            end += u64::from(chunk.bytes);
            (end, chunk.id)
        });
        Ok(Self { source, chunks: chunks.collect(), held: Vec::new(), held_from: 0 })
    }

    /// Which content lies at `offset`, and for how many bytes it is that, if it can be told without reading: equal
    /// answers, equal content.
    #[must_use]
    pub fn identity(&self, offset: u64) -> Option<((ChunkId, u64), u64)> {
        let number = self.chunks.partition_point(|(end, _)| *end <= offset);
        let (end, id) = self.chunks.get(number)?;
        let begin = number.checked_sub(1).map_or(0, |before| self.chunks[before].0);
        // Zeroes are zeroes wherever they are.
        let within = if id.is_zeroes() { 0 } else { offset - begin };
        Some(((*id, within), end - offset))
    }

    /// What lies at `offset`: at least one byte, at most `bytes`.
    ///
    /// # Errors
    /// Damage, and a region that is not in the file.
    pub fn read(&mut self, offset: u64, bytes: u64) -> Result<&[u8]> {
        if !(self.held_from..self.held_from + self.held.len() as u64).contains(&offset) {
            if offset >= self.source.bytes() {
                return Err(anyhow!(
                    "the snapshot contradicts itself: memory lies behind the end of its file"
                ));
            }
            let number = self.chunks.partition_point(|(end, _)| *end <= offset);
            let begin = match number.checked_sub(1) {
                _ if self.chunks.is_empty() => offset,
                before => before.map_or(0, |before| self.chunks[before].0),
            };
            let mut end = self.source.chunk_end(begin).max(begin + 1);
            // Small chunks together: in an object store each would be a request.
            while end < self.source.bytes() && self.source.chunk_end(end) - begin <= CHUNK_BYTES as u64 {
                end = self.source.chunk_end(end);
            }
            self.held.resize(usize::try_from(end - begin)?, 0);
            self.held_from = begin;
            if let Err(error) = self.source.read_at(begin, &mut self.held) {
                self.held.clear();
                return Err(error).context("the snapshot cannot be read");
            }
        }
        let from = usize::try_from(offset - self.held_from)?;
        let left = &self.held[from..];
        Ok(&left[..left.len().min(usize::try_from(bytes).unwrap_or(usize::MAX))])
    }
}
