//! The memory regions of a snapshot by process, device and address.

use crate::agents::ChunkTable;
use crate::criu::Pagemap;
use crate::gpu::device_memory::{self, data_file};
use anyhow::{Context, Result, anyhow};
use ckpt_snapshot::chunk::{CHUNK_BYTES, ChunkId};
use ckpt_snapshot::{Manifest, RelPath, Source, Store};
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::fmt;

/// The owner of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Owner {
    /// Device memory of a process.
    Device {
        /// The process, as the job itself sees it.
        pid: u32,
        /// Ordinal of the device.
        device: i32,
    },
    /// Host memory of a process.
    Process(u32),
    /// A shared memory segment, by CRIU's number; its addresses are offsets.
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

/// A region of memory, and the location of its content in the snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryRegion {
    /// The address in the owner; `None` for device memory that is not mapped.
    pub address: Option<u64>,
    /// Its length.
    pub bytes: u64,
    /// The data file.
    pub file: RelPath,
    /// Its offset in the data file.
    pub offset: u64,
}

impl MemoryRegion {
    /// A name that is unique among the regions of the same owner.
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

/// The device memory and the host memory of a snapshot.
///
/// # Errors
/// When the snapshot is damaged, or an image cannot be parsed.
pub fn of_all(store: &dyn Store, manifest: &Manifest) -> Result<Memory> {
    let mut memory = of_devices(store, manifest)?;
    memory.append(&mut of_processes(store, manifest)?);
    Ok(memory)
}

/// The device memory of a snapshot.
///
/// # Errors
/// When the snapshot is damaged.
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

/// The host memory in a snapshot. Untouched memory and the content of mapped files are not in a snapshot.
///
/// # Errors
/// When the snapshot is damaged, or an image cannot be parsed.
fn of_processes(store: &dyn Store, manifest: &Manifest) -> Result<Memory> {
    let mut all = Memory::new();
    for file in &manifest.files {
        let Some(owner) = pagemap_of(file.path.as_str()) else { continue };
        let image = store.read(manifest, &file.path)?;
        let pagemap = Pagemap::parse(&image).ok_or_else(|| anyhow!("cannot parse {}", file.path))?;
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

/// The readers of a snapshot's data files, each opened when it is first needed.
pub struct Readers<'a> {
    store: &'a dyn Store,
    manifest: &'a Manifest,
    opened: HashMap<RelPath, Reader<'a>>,
}

impl<'a> Readers<'a> {
    /// The readers for the snapshot with this manifest.
    #[must_use]
    pub fn new(store: &'a dyn Store, manifest: &'a Manifest) -> Self {
        Self { store, manifest, opened: HashMap::new() }
    }

    /// The reader of the data file `path`.
    ///
    /// # Errors
    /// When the snapshot is damaged.
    pub fn of(&mut self, path: &RelPath) -> Result<&mut Reader<'a>> {
        Ok(match self.opened.entry(path.clone()) {
            Entry::Occupied(opened) => opened.into_mut(),
            Entry::Vacant(place) => place.insert(Reader::open(self.store, self.manifest, path)?),
        })
    }
}

/// Reads regions of a data file; a chunk with several small regions is read once.
pub struct Reader<'a> {
    source: Box<dyn Source + 'a>,
    chunks: ChunkTable,
    buffer: Vec<u8>,
    buffer_offset: u64,
}

impl<'a> Reader<'a> {
    /// Opens the data file `path`.
    ///
    /// # Errors
    /// When the snapshot is damaged.
    fn open(store: &'a dyn Store, manifest: &Manifest, path: &RelPath) -> Result<Self> {
        let source = store.source(manifest, path)?;
        let chunks = ChunkTable::of(data_file(manifest, path).context("the file is in the manifest")?);
        Ok(Self { source, chunks, buffer: Vec::new(), buffer_offset: 0 })
    }

    /// Identifies the content at `offset` without reading it, if possible: equal identities mean equal content. The second
    /// number is the length of that content in bytes.
    #[must_use]
    pub fn identity(&self, offset: u64) -> Option<((ChunkId, u64), u64)> {
        let (chunk, id) = self.chunks.at(offset)?;
        // In a chunk of zeroes the content is the same at every offset.
        let within = if id.is_zeroes() { 0 } else { offset - chunk.start };
        Some(((id, within), chunk.end - offset))
    }

    /// The whole content of a range.
    ///
    /// # Errors
    /// As for [`Reader::read`].
    pub fn read_all(&mut self, offset: u64, bytes: u64) -> Result<Vec<u8>> {
        let mut content = Vec::with_capacity(usize::try_from(bytes)?);
        while (content.len() as u64) < bytes {
            let done = content.len() as u64;
            content.extend_from_slice(self.read(offset + done, bytes - done)?);
        }
        Ok(content)
    }

    /// What lies at `offset`: at least one byte, at most `bytes`.
    ///
    /// # Errors
    /// Damage, and a region that is not in the file.
    pub fn read(&mut self, offset: u64, bytes: u64) -> Result<&[u8]> {
        if !(self.buffer_offset..self.buffer_offset + self.buffer.len() as u64).contains(&offset) {
            if offset >= self.source.bytes() {
                return Err(anyhow!("the snapshot is inconsistent: a memory region is outside of its file"));
            }
            let begin = self.chunks.at(offset).map_or(offset, |(chunk, _)| chunk.start);
            let mut end = self.source.chunk_end(begin).max(begin + 1);
            // Reads small chunks together: in an object store each read is a request.
            while end < self.source.bytes() && self.source.chunk_end(end) - begin <= CHUNK_BYTES as u64 {
                end = self.source.chunk_end(end);
            }
            self.buffer.resize(usize::try_from(end - begin)?, 0);
            self.buffer_offset = begin;
            if let Err(error) = self.source.read_at(begin, &mut self.buffer) {
                self.buffer.clear();
                return Err(error).context("cannot read the snapshot");
            }
        }
        let from = usize::try_from(offset - self.buffer_offset)?;
        let left = &self.buffer[from..];
        Ok(&left[..left.len().min(usize::try_from(bytes).unwrap_or(usize::MAX))])
    }
}
