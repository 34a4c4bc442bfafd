//! Device memory in snapshots: from mirrors to the store, and from the store to mirrors, or to processes without one.
//!
//! The used parts of a process's mirror become `gpu/PID.mem`, and its agent's report becomes `gpu/PID.json`.

use crate::agents::{
    Agents, ContentLost, GpuState, Mirror, MirrorMode, Offer, Placement, Process, Reader, Refill,
    StoredContent, UnchangedChunks, clipped, merge_ranges,
};
use crate::sys::memory;
use anyhow::{Context, Result, bail};
use ckpt_protocol::agent::{GpuReport, Region};
use ckpt_protocol::control::DeviceMemory;
use ckpt_snapshot::chunk::{ChunkId, is_zeroes};
use ckpt_snapshot::{
    Damage, DataFile, GpuProcess, Manifest, ReadError, RelPath, Source, Store, Target, Tiers, size_text,
};
use rustix::fs::FallocateFlags;
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use super::mapped::MappedFile;

/// With more cores, mirrors are written through a mapping. With fewer, they do not wait for each other in write(2) for long,
/// and a mapping is slower where there are no huge pages.
const WRITE_CORES: usize = 4;
/// Holes of a mirror that is loaded begin and end at multiples of this, as most of those that agents leave.
const HOLE_BYTES: u64 = 2 << 20;

/// An agent has reported memory that is not in its mirror.
#[derive(Debug, thiserror::Error)]
#[error(
    "bug in the interposer in {process}: it reports {reported_bytes} bytes of device memory, but its mirror has {mirror_bytes}. Please report this bug"
)]
pub struct ReportError {
    /// The process.
    process: Process,
    /// Where the last region ends.
    reported_bytes: u64,
    /// Size of the mirror.
    mirror_bytes: u64,
}

/// Device memory cannot be given to the store.
#[derive(Debug, thiserror::Error)]
pub enum StoreDeviceMemoryError {
    /// The report of an agent contradicts its mirror.
    #[error(transparent)]
    Report(#[from] ReportError),
    /// The system does not tell which parts of a mirror are holes.
    #[error("cannot find the holes in the copy of the device memory of {process}")]
    Holes {
        /// The process.
        process: Process,
        /// The error of the system.
        source: io::Error,
    },
    /// The content of a mirror is incomplete.
    #[error("{process}: {source}")]
    Lost {
        /// The process.
        process: Process,
        /// The reason.
        source: ContentLost,
    },
    /// The report of an agent cannot be written as JSON.
    #[error("cannot encode the report of the interposer")]
    Encode(#[source] serde_json::Error),
}

#[cfg(test)]
impl ReportError {
    /// An example for this process.
    pub(crate) fn example(process: Process) -> Self {
        Self { process, reported_bytes: 2, mirror_bytes: 1 }
    }
}

/// The used ranges of a mirror, sorted, without overlaps.
fn extents(state: &GpuState) -> Result<Vec<Range<u64>>, ReportError> {
    let of = |region: &Region| region.offset..region.offset.saturating_add(region.bytes);
    let regions = state.report.regions.iter().filter(|region| region.bytes > 0);
    let extents = merge_ranges(regions.map(of).collect());
    let reported_bytes = extents.last().map_or(0, |last| last.end);
    let mirror_bytes = state.mirror.as_ref().map_or(0, |mirror| mirror.bytes);
    if reported_bytes <= mirror_bytes {
        return Ok(extents);
    }
    Err(ReportError { process: state.process.clone(), reported_bytes, mirror_bytes })
}

/// The content of a mirror from its beginning to the end of its last used range. Unused ranges read as zeroes.
struct MirrorContent {
    bytes: u64,
    /// `None` for a process without a mirror, which has no extents.
    mirror: Option<Mirror>,
    /// The used ranges, without holes.
    extents: Vec<Range<u64>>,
    /// The number of the capture that wrote the content.
    capture: Option<u64>,
    /// Chunks that need not be read.
    unchanged: Option<UnchangedChunks>,
    /// Whether the mirror has only what was written since the last commit.
    is_freed: bool,
    /// Reads the memory of a mirror that is a window.
    reader: Option<Arc<Reader>>,
    read_bytes: AtomicU64,
}

impl MirrorContent {
    fn of(state: &GpuState) -> Result<Self, StoreDeviceMemoryError> {
        let capture = state.report.capture.as_ref().map(|capture| capture.number);
        let of = |mirror: &Mirror| {
            let history = mirror.history.lock();
            (history.unchanged_in(capture), history.is_freed())
        };
        let (unchanged, is_freed) = state.mirror.as_ref().map_or((None, false), of);
        let (mirror, mut extents) = (state.mirror.clone(), extents(state)?);
        let bytes = extents.last().map_or(0, |last| last.end);
        let mut read_bytes = AtomicU64::new(0);
        if let Some(window) = mirror.as_ref().and_then(|mirror| mirror.window.as_ref()) {
            let used = window.used();
            extents = extents.iter().flat_map(|extent| clipped(&used, extent)).collect();
            read_bytes = window.read_bytes().into();
        } else if let Some(mirror) = mirror.as_ref().filter(|mirror| mirror.has_holes) {
            let process = || state.process.clone();
            let mut data = mirror
                .data()
                .map_err(|source| StoreDeviceMemoryError::Holes { process: process(), source })?;
            if is_freed {
                let lost = || StoreDeviceMemoryError::Lost { process: process(), source: ContentLost };
                data = unchanged.as_ref().ok_or_else(lost)?.content(&data, mirror.bytes);
            }
            extents = extents.iter().flat_map(|extent| clipped(&data, extent)).collect();
        }
        Ok(Self { bytes, mirror, extents, capture, unchanged, is_freed, reader: None, read_bytes })
    }

    /// Reads a part of an extent.
    fn read_extent(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let mirror = self.mirror.as_ref().ok_or(io::ErrorKind::NotFound)?;
        if mirror.window.is_some() {
            return self.reader.as_ref().ok_or(io::ErrorKind::NotFound)?.read_at(offset, into);
        }
        let from_file = |offset, into: &mut [u8]| mirror.file.read_exact_at(into, offset);
        match self.unchanged.as_ref().filter(|_| self.is_freed) {
            // If it cannot be read, the next capture has to bring all of it.
            Some(unchanged) => unchanged
                .read_at(offset, into, from_file)
                .inspect_err(|_| mirror.history.lock().discard_commit()),
            None => from_file(offset, into),
        }
    }

    /// How much memory the content takes.
    fn used_bytes(&self) -> u64 {
        self.extents.iter().map(|extent| extent.end - extent.start).sum()
    }
}

impl Source for MirrorContent {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.read_bytes.fetch_add(into.len() as u64, Ordering::Relaxed);
        let end = offset + into.len() as u64;
        let first = self.extents.partition_point(|extent| extent.end <= offset);
        let mut rest = into;
        let mut position = offset;
        let in_range = |part: u64| usize::try_from(part).map_err(io::Error::other);
        for extent in self.extents[first..].iter().take_while(|extent| extent.start < end) {
            let from = extent.start.max(position);
            let (gap, after) = rest.split_at_mut(in_range(from - position)?);
            gap.fill(0);
            let (part, after) = after.split_at_mut(in_range(extent.end.min(end) - from)?);
            self.read_extent(from, part)?;
            position = from + part.len() as u64;
            rest = after;
        }
        rest.fill(0);
        Ok(())
    }

    fn known(&self, range: Range<u64>) -> Option<ChunkId> {
        if clipped(&self.extents, &range).next().is_none() {
            // Nothing to read, which is no saving by the chunks that the store has.
            self.read_bytes.fetch_add(range.end - range.start, Ordering::Relaxed);
            return Some(ChunkId::ZEROES);
        }
        self.unchanged.as_ref()?.chunk(&range, &self.extents)
    }
}

/// The device memory of a process that has a window, ready to be stored while it is being detached.
pub struct OfferedMemory {
    path: RelPath,
    content: MirrorContent,
}

impl OfferedMemory {
    /// The memory of an offer; `None` if there is none.
    ///
    /// # Errors
    /// The report of the agent contradicts its window.
    pub fn of(offer: &Offer) -> Result<Option<Self>, StoreDeviceMemoryError> {
        let content = MirrorContent::of(&offer.state)?;
        let Some(pid) = offer.state.process.pid.filter(|_| content.bytes > 0) else { return Ok(None) };
        let (reader, read_bytes) = (Some(Arc::clone(&offer.reader)), AtomicU64::new(0));
        Ok(Some(Self { path: memory_path(pid), content: MirrorContent { reader, read_bytes, ..content } }))
    }

    /// Its data file.
    #[must_use]
    pub fn source(&self) -> (&RelPath, &dyn Source) {
        (&self.path, &self.content)
    }

    /// Notes how much was read.
    pub fn stored(&self) {
        if let Some(window) = self.content.mirror.as_ref().and_then(|mirror| mirror.window.as_ref()) {
            window.set_read_bytes(self.content.read_bytes.load(Ordering::Relaxed));
        }
    }
}

fn memory_path(pid: u32) -> RelPath {
    RelPath::new(format!("gpu/{pid}.mem")).expect("a plain path")
}

/// The device memory of a process, ready to be stored.
pub struct StoredProcess {
    /// Its entry in the manifest.
    pub process: GpuProcess,
    content: MirrorContent,
    report: Vec<u8>,
}

impl StoredProcess {
    /// Its data files, without what was stored while it was being detached.
    pub fn sources(&self) -> impl Iterator<Item = (&RelPath, &dyn Source)> {
        let has_window = self.content.mirror.as_ref().is_some_and(|mirror| mirror.window.is_some());
        let memory = self.process.memory.as_ref().filter(|_| !has_window);
        let memory = memory.map(|path| (path, &self.content as &dyn Source));
        memory.into_iter().chain([(&self.process.report, &self.report as &dyn Source)])
    }

    /// Memory that was not read because the store had it already, bytes.
    #[must_use]
    pub fn unread_bytes(&self) -> u64 {
        self.content.bytes().saturating_sub(self.content.read_bytes.load(Ordering::Relaxed))
    }

    /// Records that the snapshot was committed: chunks that do not change until the next capture need not be read again.
    pub fn record_commit(&self, manifest: &Arc<Manifest>, store: &Arc<Tiers>) {
        let MirrorContent { mirror: Some(mirror), extents, capture, .. } = &self.content else { return };
        let Some(path) = &self.process.memory else { return };
        if let Some(file) = data_file(manifest, path) {
            let (store, manifest) = (Arc::clone(store), Arc::clone(manifest));
            let stored = StoredContent { store, manifest, path: path.clone() };
            mirror.history.lock().record_commit(*capture, extents.clone(), file, stored);
        }
    }
}

/// The data file at `path`, as the manifest lists it.
pub(super) fn data_file<'a>(manifest: &'a Manifest, path: &RelPath) -> Option<&'a DataFile> {
    manifest.files.iter().find(|file| &file.path == path)
}

/// Prepares the device memory of processes for the store.
///
/// # Errors
/// See [`StoreDeviceMemoryError`].
pub fn to_store(states: &[GpuState]) -> Result<Vec<StoredProcess>, StoreDeviceMemoryError> {
    let mut stored = Vec::new();
    for state in states {
        let Some(pid) = state.process.pid else { continue };
        let content = MirrorContent::of(state)?;
        let mirror = state.mirror.as_ref();
        let report = serde_json::to_vec(&state.report).map_err(StoreDeviceMemoryError::Encode)?;
        let process = GpuProcess {
            pid,
            mirror: mirror.map_or(0, |mirror| mirror.number),
            mirror_bytes: mirror.map_or(0, |mirror| mirror.bytes),
            mirror_used_bytes: mirror.filter(|mirror| mirror.has_holes).map(|_| content.used_bytes()),
            supports_loads: state.supports_loads,
            memory: (content.bytes > 0).then(|| memory_path(pid)),
            report: RelPath::new(format!("gpu/{pid}.json")).expect("a plain path"),
            gpus: state.gpus.clone(),
        };
        stored.push(StoredProcess { process, content, report });
    }
    Ok(stored)
}

/// Summary of a checkpoint's device memory; `None` if there was none.
#[must_use]
pub fn outcome(states: &[GpuState], copied_back_bytes: u64) -> Option<DeviceMemory> {
    let reports = || states.iter().map(|state| &state.report);
    let regions = || reports().flat_map(|report| &report.regions);
    let mirrors = || states.iter().filter_map(|state| state.mirror.as_ref());
    let mode = if mirrors().any(|mirror| mirror.window.is_some()) {
        MirrorMode::None
    } else if mirrors().any(|mirror| mirror.is_partial) {
        MirrorMode::Changed
    } else {
        MirrorMode::All
    };
    let not_parked = states.iter().find_map(|state| {
        let reason = state.report.unparked_because.as_ref()?;
        Some(format!("{}: {reason}", state.process))
    });
    let outcome = DeviceMemory {
        processes: reports().filter(|report| !report.regions.is_empty()).count() as u64,
        bytes: regions().map(|region| region.bytes).fold(0, u64::saturating_add),
        changed_bytes: regions()
            .map(|region| region.changed_bytes)
            .try_fold(0_u64, |sum, bytes| Some(sum.saturating_add(bytes?))),
        parked_bytes: reports().map(|report| report.parked_bytes).fold(0, u64::saturating_add),
        copied_back_bytes,
        mirror: mode.name().to_owned(),
        mirror_bytes: mirrors().map(Mirror::allocated_bytes).fold(0, u64::saturating_add),
        not_parked_because: not_parked,
    };
    (outcome.processes > 0).then_some(outcome)
}

/// The device memory of a process in a snapshot, and the data file of its content.
pub struct Load {
    /// The process, as the job itself sees it.
    pub pid: u32,
    destination: Destination,
    /// The mirror's memory, to be written by many threads; `None` if it is to be written by write(2).
    mapped: OnceLock<Option<MappedFile>>,
    /// The data file.
    memory: Option<RelPath>,
    /// The length of the data file.
    pub bytes: u64,
    /// How much memory of the launcher it needs, bytes.
    pub used_bytes: u64,
}

/// Where device memory is loaded to.
enum Destination {
    /// A mirror, before the processes run.
    Mirror(Mirror),
    /// The process loads it when it runs. Before that, it is read to be verified.
    Refill(Arc<Refill>),
}

/// Where the device memory of a snapshot's processes is to be loaded to. The processes themselves take `job_bytes` of
/// memory.
///
/// # Errors
/// When there is not enough memory, and [`ReadError::Damaged`] when the manifest is inconsistent.
pub fn plan(
    store: &Arc<Tiers>,
    manifest: &Arc<Manifest>,
    mode: MirrorMode,
    job_bytes: u64,
) -> Result<Vec<Load>> {
    let available_bytes = memory::available_bytes().unwrap_or(0);
    let fits = |needed_bytes: u64| needed_bytes.saturating_add(memory::SPARE_BYTES) <= available_bytes;
    let loaded = || manifest.gpu.iter().filter(|process| process.mirror_bytes > 0);
    let mirror_bytes = loaded().map(used_bytes).fold(0, u64::saturating_add);
    let avoids_mirrors = match mode {
        MirrorMode::None => true,
        MirrorMode::Auto => !fits(mirror_bytes.saturating_add(job_bytes)),
        MirrorMode::All | MirrorMode::Changed => false,
    };
    let mut loads = Vec::new();
    for process in loaded() {
        check(process, manifest)?;
        let is_mirror = !avoids_mirrors || !process.supports_loads;
        let load = if is_mirror { None } else { refill(process, store, manifest)? };
        loads.push(load.map_or_else(|| mirror(process, manifest), Ok)?);
    }
    let needed_bytes = loads.iter().map(|load| load.used_bytes).fold(0, u64::saturating_add);
    if needed_bytes > 0 && !fits(needed_bytes) {
        bail!(
            "not enough memory for the snapshot's {} of device memory: {} is free. Free some memory, use a machine or a container with more, or resume with --mirror none",
            size_text(needed_bytes),
            size_text(available_bytes)
        );
    }
    Ok(loads)
}

/// How much memory the mirror of a process needs, bytes.
fn used_bytes(process: &GpuProcess) -> u64 {
    process.mirror_used_bytes.unwrap_or(process.mirror_bytes)
}

fn stored_bytes(process: &GpuProcess, manifest: &Manifest) -> u64 {
    let file = process.memory.as_ref().and_then(|path| data_file(manifest, path));
    file.map_or(0, |file| file.bytes)
}

fn check(process: &GpuProcess, manifest: &Manifest) -> Result<(), ReadError> {
    let most_bytes = stored_bytes(process, manifest).max(used_bytes(process));
    if most_bytes <= process.mirror_bytes {
        return Ok(());
    }
    let damage = format!("{most_bytes} bytes are to go into a mirror of {}", process.mirror_bytes);
    Err(ReadError::Damaged { id: manifest.id.to_string(), damage: Damage::Manifest(damage) })
}

fn mirror(process: &GpuProcess, manifest: &Manifest) -> Result<Load> {
    let has_holes = process.mirror_used_bytes.is_some();
    let mirror = Mirror::to_be_filled(process.mirror, process.mirror_bytes, has_holes)
        .context("cannot create a file for device memory")?;
    Ok(Load {
        pid: process.pid,
        destination: Destination::Mirror(mirror),
        mapped: OnceLock::new(),
        memory: process.memory.clone(),
        bytes: stored_bytes(process, manifest),
        used_bytes: used_bytes(process),
    })
}

/// `None` if nothing is stored for the process.
fn refill(process: &GpuProcess, store: &Arc<Tiers>, manifest: &Arc<Manifest>) -> Result<Option<Load>> {
    let Some(path) = process.memory.clone() else { return Ok(None) };
    let stored =
        StoredContent { store: Arc::clone(store), manifest: Arc::clone(manifest), path: path.clone() };
    let refill = Refill::new(process.mirror, process.mirror_bytes, used_bytes(process), stored)
        .context("cannot create a window for device memory")?;
    Ok(Some(Load {
        pid: process.pid,
        used_bytes: refill.window_bytes,
        destination: Destination::Refill(Arc::new(refill)),
        mapped: OnceLock::new(),
        memory: Some(path),
        bytes: stored_bytes(process, manifest),
    }))
}

/// What the agents take over before the processes are restored, by the processes' IDs.
#[derive(Default)]
pub struct Adopted {
    mirrors: Vec<(u32, Mirror)>,
    /// Of processes without one.
    refills: Vec<(u32, Arc<Refill>)>,
}

/// What the agents take over of these loads.
#[must_use]
pub fn adopted(loads: &[Load]) -> Adopted {
    let mut adopted = Adopted::default();
    for load in loads {
        match &load.destination {
            Destination::Mirror(mirror) => adopted.mirrors.push((load.pid, mirror.clone())),
            Destination::Refill(refill) => adopted.refills.push((load.pid, Arc::clone(refill))),
        }
    }
    adopted
}

impl Adopted {
    /// Gives it to the agents of processes that are restored on these GPUs.
    pub fn give_to(self, agents: &Agents, placements: BTreeMap<u32, Placement>) {
        agents.adopt(self.mirrors, placements);
        agents.adopt_refills(self.refills);
    }
}

impl Load {
    /// The data file and its target; `None` when there is nothing to load. Mirrors must not be used, and processes not run,
    /// before it is loaded and [`Load::finish`] has succeeded.
    #[must_use]
    pub fn wanted(&self) -> Option<(&RelPath, &dyn Target)> {
        self.memory.as_ref().map(|path| (path, self as &dyn Target))
    }

    /// Allocates the whole mirror, because it will be pinned: a lack of memory shows here. The agent of a mirror with holes
    /// pins only what has been loaded.
    ///
    /// # Errors
    /// When the memory cannot be allocated.
    pub fn finish(&self) -> Result<(), ReadError> {
        let Destination::Mirror(mirror) = &self.destination else { return Ok(()) };
        let Some(path) = self.memory.as_ref().filter(|_| !mirror.has_holes) else { return Ok(()) };
        let allocated = rustix::fs::fallocate(&*mirror.file, FallocateFlags::empty(), 0, mirror.bytes);
        allocated.map_err(|error| ReadError::Target { path: path.to_string(), source: error.into() })
    }

    fn write_mirror(&self, mirror: &Mirror, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let map = || {
            let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
            (cores > WRITE_CORES).then(|| MappedFile::new(&mirror.file, mirror.bytes).ok()).flatten()
        };
        let mapped = self.mapped.get_or_init(map).as_ref();
        match mapped.map(|mapped| mapped.write_at(offset, bytes)) {
            Some(Err(error)) if error.kind() != io::ErrorKind::InvalidInput => Err(error),
            Some(Ok(())) => Ok(()),
            _ => mirror.file.write_all_at(bytes, offset),
        }
    }
}

/// The mirror keeps its own size: the part after the loaded content is unused. Without a mirror nothing is kept.
impl Target for Load {
    fn set_bytes(&self, _bytes: u64) -> io::Result<()> {
        let Destination::Mirror(mirror) = &self.destination else { return Ok(()) };
        mirror.file.set_len(0)?;
        mirror.file.set_len(mirror.bytes)
    }

    /// Zeroes are not written where the mirror may have holes.
    fn write_at(&self, mut offset: u64, bytes: &[u8]) -> io::Result<()> {
        let Destination::Mirror(mirror) = &self.destination else { return Ok(()) };
        if !mirror.has_holes {
            return mirror.file.write_all_at(bytes, offset);
        }
        let mut rest = bytes;
        while !rest.is_empty() {
            let left_bytes = usize::try_from(HOLE_BYTES - offset % HOLE_BYTES).map_err(io::Error::other)?;
            let (part, after) = rest.split_at(left_bytes.min(rest.len()));
            if !is_zeroes(part) {
                self.write_mirror(mirror, offset, part)?;
            }
            offset += part.len() as u64;
            rest = after;
        }
        Ok(())
    }
}

/// The agent's report about a process's device memory.
///
/// # Errors
/// When the report is damaged.
pub fn read_report(store: &dyn Store, manifest: &Manifest, process: &GpuProcess) -> Result<GpuReport> {
    serde_json::from_slice(&store.read(manifest, &process.report)?)
        .with_context(|| format!("cannot parse {} of the snapshot {}", process.report, manifest.id))
}

#[cfg(test)]
#[expect(clippy::single_range_in_vec_init, reason = "one range is meant")]
mod tests {
    use super::*;
    use crate::agents::Present;
    use ckpt_protocol::agent::{Capture, RegionFlags, RegionKind};
    use ckpt_snapshot::Input;
    use ckpt_snapshot::codec::Codec;
    use ckpt_snapshot::medium::DirMedium;
    use ckpt_snapshot::packed::{Limits, PackStore};
    use std::sync::Arc;

    fn region(offset: u64, bytes: u64) -> Region {
        let kind = RegionKind::Allocation;
        let (flags, changed_bytes) = (RegionFlags::default(), Some(bytes / 2));
        Region {
            address: 0,
            bytes,
            device: 0,
            kind,
            allocations: 1,
            offset,
            changed_bytes,
            flags,
            origin: None,
        }
    }

    fn state(pid: u32, mirror: Option<Mirror>, regions: Vec<Region>) -> GpuState {
        let process = Process { pid: Some(pid), host_pid: None, exe: String::new() };
        GpuState {
            process,
            mirror,
            report: GpuReport { regions, ..GpuReport::default() },
            gpus: Vec::new(),
            supports_loads: true,
        }
    }

    /// The content, read in steps of several sizes, so that boundaries of steps and extents meet in all combinations.
    fn content(state: &GpuState) -> Vec<u8> {
        let [stored] = &to_store(std::slice::from_ref(state)).unwrap()[..] else { panic!("one process") };
        let mut whole = vec![1; usize::try_from(stored.content.bytes()).unwrap()];
        stored.content.read_at(0, &mut whole).unwrap();
        for step in [1, 3, 7, 100, 1000] {
            let mut found = vec![1; whole.len()];
            for (number, part) in found.chunks_mut(step).enumerate() {
                stored.content.read_at((number * step) as u64, part).unwrap();
            }
            assert!(found == whole, "in steps of {step}");
        }
        whole
    }

    #[test]
    fn only_used_memory_is_stored() {
        let mirror = Mirror::new(4 << 20).unwrap();
        mirror.file.write_all_at(&[7; 3 << 20], 0).unwrap();
        let some = |regions| state(5, Some(mirror.clone()), regions);
        let found = content(&some(vec![region(1000, 24), region(10, 5), region(12, 8), region(3000, 0)]));
        let mut expected = vec![0; 10];
        expected.extend([7; 10]);
        expected.extend([0; 980]);
        expected.extend([7; 24]);
        assert_eq!(found, expected);
        assert_eq!(content(&some(Vec::new())), b"");
    }

    #[test]
    fn memory_outside_of_the_mirror_is_refused() {
        let mirror = Mirror::new(2 << 20).unwrap();
        let whole = state(5, Some(mirror.clone()), vec![region(1 << 20, 1 << 20)]);
        assert!(to_store(&[whole]).is_ok());
        let wrong = [
            state(5, Some(mirror.clone()), vec![region(1 << 20, (1 << 20) + 1)]),
            state(5, Some(mirror), vec![region(u64::MAX, u64::MAX)]),
            state(5, None, vec![region(0, 1)]),
        ];
        for state in wrong {
            let error = to_store(&[state]).err().unwrap().to_string();
            assert!(error.contains("process 5") && error.contains("its mirror has"), "{error}");
        }
    }

    #[test]
    fn stored_memory_is_loaded_into_the_same_mirror() {
        let dir = tempfile::tempdir().unwrap();
        let snapshots = tiers(dir.path());
        let mirror = Mirror::new(6 << 20).unwrap();
        mirror.file.write_all_at(b"device memory", 5 << 20).unwrap();
        let states = [state(5, Some(mirror.clone()), vec![region(5 << 20, 13)]), state(6, None, Vec::new())];
        let manifest = crate::checkpoint::attempt::tests::manifest(Vec::new());
        let mut writer = snapshots.begin(&manifest.id, 100).unwrap();
        let stored = to_store(&states).unwrap();
        let inputs = stored.iter().flat_map(StoredProcess::sources);
        let inputs: Vec<_> = inputs.map(|(path, from)| Input { path: path.clone(), from }).collect();
        writer.put(&inputs, &|_| {}).unwrap();
        let gpu: Vec<_> = stored.iter().map(|stored| stored.process.clone()).collect();
        let manifest = Manifest { gpu, ..manifest };
        let saved = writer.commit(Manifest { version: manifest.least_version(), ..manifest }).unwrap();
        let paths: Vec<_> = saved.files.iter().map(|file| file.path.as_str()).collect();
        assert_eq!(paths, ["gpu/5.mem", "gpu/5.json", "gpu/6.json"]);
        assert_eq!(read_report(&*snapshots, &saved, &saved.gpu[0]).unwrap(), states[0].report);

        let plan = |manifest: &Manifest| plan(&snapshots, &Arc::new(manifest.clone()), MirrorMode::All, 0);
        let loads = plan(&saved).unwrap();
        assert_eq!(loads.len(), 1);
        let (path, into) = loads[0].wanted().unwrap();
        snapshots.load(&saved, &[ckpt_snapshot::Load { path, into }], &|_| {}).unwrap();
        loads[0].finish().unwrap();
        let (_, loaded) = &adopted(&loads).mirrors[0];
        assert_eq!((loaded.number, loaded.bytes), (mirror.number, mirror.bytes));
        assert_eq!(loaded.file.metadata().unwrap().len(), mirror.bytes);
        let mut found = [0; 13];
        loaded.file.read_exact_at(&mut found, 5 << 20).unwrap();
        assert_eq!(&found, b"device memory");

        let mut wrong = saved.clone();
        wrong.gpu[0].mirror_bytes = 4 << 20;
        let error = plan(&wrong).err().unwrap();
        assert!(matches!(error.downcast_ref(), Some(ReadError::Damaged { .. })), "{error:?}");
        let mut larger = saved.clone();
        larger.gpu[0].mirror_used_bytes = Some(mirror.bytes + 1);
        assert!(plan(&larger).is_err());
        leaves_room_for_the_job(&snapshots, &saved);
        let mut large = saved;
        large.gpu[0].mirror_bytes = 1 << 60;
        large.files[0].bytes = 1 << 59;
        let error = plan(&large).err().unwrap().to_string();
        assert!(error.contains("is free") && error.contains("--mirror none"), "{error}");
        // Without a mirror, or where there is no room for one.
        let large = Arc::new(large);
        for mode in [MirrorMode::None, MirrorMode::Auto] {
            let loads = super::plan(&snapshots, &large, mode, 0).unwrap();
            let Adopted { mirrors, refills } = adopted(&loads);
            assert!(mirrors.is_empty() && loads[0].used_bytes == 32 << 20, "{mode:?}");
            assert_eq!((refills[0].0, refills[0].1.number, refills[0].1.bytes), (5, mirror.number, 1 << 60));
        }
        // An agent of an earlier version gets a mirror.
        let mut old = Manifest::clone(&large);
        old.gpu[0].supports_loads = false;
        assert!(super::plan(&snapshots, &Arc::new(old), MirrorMode::None, 0).is_err());
    }

    /// No mirror is made by itself where the job's own memory leaves no room for one.
    fn leaves_room_for_the_job(snapshots: &Arc<Tiers>, saved: &Manifest) {
        let saved = Arc::new(saved.clone());
        let has_mirror =
            |mode, job_bytes| !adopted(&plan(snapshots, &saved, mode, job_bytes).unwrap()).mirrors.is_empty();
        assert!(has_mirror(MirrorMode::Auto, 0) && !has_mirror(MirrorMode::Auto, 1 << 60));
        assert!(has_mirror(MirrorMode::All, 1 << 60));
    }

    /// Holes take neither room in the store nor memory after a resume.
    #[test]
    fn holes_stay_holes() {
        const MIB: u64 = 1 << 20;
        let dir = tempfile::tempdir().unwrap();
        let snapshots = tiers(dir.path());
        // The last region is one hole.
        let mirror = Mirror::with_holes(64 * MIB).unwrap();
        let noise: Vec<u8> = std::iter::repeat_with(|| fastrand::u8(..)).take(2 << 20).collect();
        for at in [2 * MIB, 14 * MIB] {
            mirror.file.write_all_at(&noise, at).unwrap();
        }
        let states = [state(5, Some(mirror.clone()), vec![region(0, 40 * MIB), region(44 * MIB, 20 * MIB)])];
        let [stored] = &to_store(&states).unwrap()[..] else { panic!("one process") };
        assert_eq!((stored.content.bytes(), stored.process.mirror_used_bytes), (64 * MIB, Some(4 * MIB)));
        let manifest = crate::checkpoint::attempt::tests::manifest(Vec::new());
        let mut writer = snapshots.begin(&manifest.id, 100).unwrap();
        let inputs = stored.sources().map(|(path, from)| Input { path: path.clone(), from });
        writer.put(&inputs.collect::<Vec<_>>(), &|_| {}).unwrap();
        assert_eq!(stored.content.read_bytes.load(Ordering::Relaxed), 64 * MIB);
        let saved = writer.commit(Manifest { gpu: vec![stored.process.clone()], ..manifest }).unwrap();
        let saved = Arc::new(saved);
        let loads = plan(&snapshots, &saved, MirrorMode::All, 0).unwrap();
        assert_eq!((loads[0].used_bytes, outcome(&states, 0).unwrap().mirror_bytes), (4 * MIB, 4 * MIB));
        let (path, into) = loads[0].wanted().unwrap();
        snapshots.load(&saved, &[ckpt_snapshot::Load { path, into }], &|_| {}).unwrap();
        loads[0].finish().unwrap();
        let (_, loaded) = &adopted(&loads).mirrors[0];
        assert_eq!((loaded.bytes, loaded.data().unwrap()), (mirror.bytes, mirror.data().unwrap()));
        for at in [2 * MIB, 14 * MIB] {
            let mut found = vec![0; noise.len()];
            loaded.file.read_exact_at(&mut found, at).unwrap();
            assert!(found == noise);
        }
    }

    /// Saves the state; returns the stored content, read back, and how many bytes were not read for saving.
    fn saved(store: &Arc<Tiers>, sequence: u64, state: &GpuState, is_committed: bool) -> (Vec<u8>, u64) {
        let [stored] = &to_store(std::slice::from_ref(state)).unwrap()[..] else { panic!("one process") };
        let id = ckpt_snapshot::SnapshotId::new(sequence, std::time::SystemTime::UNIX_EPOCH);
        let manifest = Manifest { id, ..crate::checkpoint::attempt::tests::manifest(Vec::new()) };
        let mut writer = store.begin(&manifest.id, 100).unwrap();
        let inputs = stored.sources().map(|(path, from)| Input { path: path.clone(), from });
        writer.put(&inputs.collect::<Vec<_>>(), &|_| {}).unwrap();
        let manifest = Arc::new(writer.commit(manifest).unwrap());
        if is_committed {
            stored.record_commit(&manifest, store);
        }
        let memory =
            (&**store as &dyn Store).read(&manifest, stored.process.memory.as_ref().unwrap()).unwrap();
        (memory, stored.unread_bytes())
    }

    const CHUNK: u64 = ckpt_snapshot::chunk::CHUNK_BYTES as u64;

    fn tiers(dir: &std::path::Path) -> Arc<Tiers> {
        let medium = Arc::new(DirMedium::new(dir.to_owned()));
        let store = PackStore::new(medium, Codec::default(), Limits::default());
        Arc::new(Tiers::new(vec![ckpt_snapshot::Tier::new("disk", Box::new(store), true)]))
    }

    #[test]
    fn unchanged_memory_is_not_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let store = tiers(dir.path());
        let mirror = Mirror::new(5 * CHUNK).unwrap();
        let write = |byte: u8, at: u64, bytes: u64| {
            mirror.file.write_all_at(&vec![byte; usize::try_from(bytes).unwrap()], at).unwrap();
        };
        (0..5).for_each(|chunk| write(chunk as u8 + 1, chunk * CHUNK, CHUNK));
        let mut number = 0;
        let mut save = |regions: &[(u64, u64)], written: &[Range<u64>], is_committed| {
            number += 1;
            let mut capture = Capture { mirror: mirror.number, number, written: written.to_vec() };
            mirror.record_capture(Some(&mut capture));
            let regions = regions.iter().map(|(offset, bytes)| region(*offset, *bytes)).collect();
            let mut state = state(5, Some(mirror.clone()), regions);
            state.report.capture = Some(Box::new(capture));
            let (found, unread_bytes) = saved(&store, number, &state, is_committed);
            let content = MirrorContent::of(&state).unwrap();
            let mut whole = vec![1; found.len()];
            content.read_at(0, &mut whole).unwrap();
            assert!(
                content.bytes() == whole.len() as u64 && found == whole,
                "the stored content differs from the mirror"
            );
            unread_bytes
        };
        let whole = [(0, 5 * CHUNK)];
        assert_eq!(save(&whole, &[0..5 * CHUNK], true), 0, "the first time");
        assert_eq!(save(&whole, &[], true), 5 * CHUNK);
        // A capture that is not committed, and the next one.
        write(8, CHUNK, 10);
        assert_eq!(save(&whole, &[CHUNK..CHUNK + 10], false), 4 * CHUNK);
        write(9, 3 * CHUNK - 10, 10);
        assert_eq!(save(&whole, &[3 * CHUNK - 10..3 * CHUNK], true), 3 * CHUNK);
        assert_eq!(save(&whole, &[], true), 5 * CHUNK);
        // Memory in the middle is freed, and allocated again.
        let parts = [(0, CHUNK), (2 * CHUNK, 3 * CHUNK)];
        assert_eq!(save(&parts, &[], true), 4 * CHUNK);
        write(7, CHUNK, CHUNK);
        assert_eq!(save(&whole, &[CHUNK..2 * CHUNK], true), 4 * CHUNK);
        // Memory at the end is freed.
        let small = [(0, 4 * CHUNK + 10)];
        assert_eq!(save(&small, &[], true), 4 * CHUNK);
        // The mirror grows, and shrinks.
        let larger = mirror.resized(6 * CHUNK).unwrap();
        assert_eq!(save(&small, &[], true), 4 * CHUNK + 10);
        larger.resized(5 * CHUNK).unwrap();
        assert_eq!(save(&small, &[], true), 0);
        assert_eq!(save(&small, &[], true), 4 * CHUNK + 10);
        // A capture into another mirror.
        let mut other = Capture { mirror: mirror.number + 1, number: 11, written: Vec::new() };
        mirror.record_capture(Some(&mut other));
        assert_eq!(save(&small, &[], true), 0);
    }

    /// A process whose mirror is partial, and a model of its device memory.
    struct Partial {
        store: Arc<Tiers>,
        mirror: Mirror,
        memory: Vec<u8>,
        captures: u64,
        saves: u64,
    }

    impl Partial {
        fn new(dir: &std::path::Path) -> Self {
            let mirror = Mirror { is_partial: true, ..Mirror::with_holes(4 * CHUNK).unwrap() };
            let memory = vec![0; usize::try_from(4 * CHUNK).unwrap()];
            Self { store: tiers(dir), mirror, memory, captures: 0, saves: 0 }
        }

        /// The program writes, and a capture copies what has changed.
        fn capture(&mut self, written: &[(u8, Range<u64>)]) -> GpuState {
            for (byte, range) in written {
                let range = usize::try_from(range.start).unwrap()..usize::try_from(range.end).unwrap();
                self.memory[range.clone()].fill(*byte);
                self.mirror.file.write_all_at(&self.memory[range.clone()], range.start as u64).unwrap();
            }
            self.captures += 1;
            let written = merge_ranges(written.iter().map(|(_, range)| range.clone()).collect());
            let mut capture = Capture { mirror: self.mirror.number, number: self.captures, written };
            self.mirror.record_capture(Some(&mut capture));
            let mut state = state(5, Some(self.mirror.clone()), vec![region(0, 4 * CHUNK)]);
            state.report.capture = Some(Box::new(capture));
            state
        }

        /// Saves a capture, and checks what was saved; frees the mirror if it was committed.
        fn save(&mut self, state: &GpuState, is_committed: bool) {
            self.saves += 1;
            let (found, _) = saved(&self.store, self.saves, state, is_committed);
            assert!(found == self.memory, "the snapshot {} differs from the memory", self.saves);
            if is_committed {
                self.mirror.free_stored().unwrap();
                assert_eq!(self.mirror.allocated_bytes(), 0);
            }
        }
    }

    #[test]
    fn a_partial_mirror_and_the_store_have_all_of_the_content() {
        let dir = tempfile::tempdir().unwrap();
        let mut one = Partial::new(dir.path());
        let half = CHUNK / 2;
        let first = one.capture(&[(1, 0..2 * CHUNK), (2, 2 * CHUNK..3 * CHUNK)]);
        one.save(&first, true);
        // Nothing has changed; a half of a chunk; a save that fails, and what is written after it.
        let same = one.capture(&[]);
        one.save(&same, true);
        let part = one.capture(&[(3, half..CHUNK)]);
        one.save(&part, true);
        let failed = one.capture(&[(4, CHUNK..CHUNK + half)]);
        one.save(&failed, false);
        let next = one.capture(&[(5, 0..half), (6, 3 * CHUNK + half..4 * CHUNK)]);
        one.save(&next, true);
        // Zeroes are written, and are a hole.
        let zeroes = one.capture(&[(0, 2 * CHUNK..3 * CHUNK)]);
        one.save(&zeroes, true);

        // What was freed is put back, but not over what a capture has written since.
        let _ = one.capture(&[(7, half..CHUNK)]);
        one.mirror.fill(vec![0..3 * CHUNK, 2 * CHUNK..4 * CHUNK]).unwrap();
        let mut found = vec![1; one.memory.len()];
        one.mirror.file.read_exact_at(&mut found, 0).unwrap();
        assert!(found == one.memory);
        let after = one.capture(&[]);
        one.save(&after, true);
    }

    #[test]
    fn a_partial_mirror_is_replaced_when_a_capture_or_the_snapshot_is_missing() {
        let dir = tempfile::tempdir().unwrap();
        let mut one = Partial::new(dir.path());
        let state = one.capture(&[(1, 0..4 * CHUNK)]);
        one.save(&state, true);
        let is_complete = |one: &Partial, captures| one.mirror.is_complete(captures, &mut Present::default());
        assert!(is_complete(&one, 1) && !is_complete(&one, 2), "the process has captured once more");
        // The capture 2 was not reported.
        one.captures += 1;
        let state = one.capture(&[]);
        let error = to_store(&[state]).err().unwrap().to_string();
        assert!(error.contains("process 5") && error.contains("incomplete"), "{error}");
        assert!(!is_complete(&one, 3) && one.mirror.fill(vec![0..1]).is_err());

        let dir = tempfile::tempdir().unwrap();
        let mut one = Partial::new(dir.path());
        let state = one.capture(&[(1, 0..4 * CHUNK)]);
        one.save(&state, true);
        let listed = one.store.list().unwrap();
        one.store.remove(&listed[0].id).unwrap();
        assert!(!is_complete(&one, 1), "its snapshot was deleted");
    }

    /// A save that needs damaged chunks names them; the next capture brings everything.
    #[test]
    fn damage_under_a_partial_mirror_is_an_error_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let mut one = Partial::new(dir.path());
        let state = one.capture(&[(1, 0..2 * CHUNK), (2, 2 * CHUNK..4 * CHUNK)]);
        one.save(&state, true);
        let packs: Vec<_> = std::fs::read_dir(dir.path().join("packs")).unwrap().flatten().collect();
        for pack in packs.iter().filter(|pack| pack.path().extension().is_some_and(|it| it == "pack")) {
            let bytes = usize::try_from(pack.metadata().unwrap().len()).unwrap();
            std::fs::write(pack.path(), vec![0x5a; bytes]).unwrap();
        }
        let state = one.capture(&[(3, 0..CHUNK / 2), (3, 2 * CHUNK..2 * CHUNK + CHUNK / 2)]);
        let [stored] = &to_store(&[state]).unwrap()[..] else { panic!("one process") };
        let mut whole = vec![0; one.memory.len()];
        let error = stored.content.read_at(0, &mut whole).unwrap_err().to_string();
        assert!(error.contains("damaged"), "{error}");
        assert!(!one.mirror.is_complete(2, &mut Present::default()));
    }

    /// A process of the job may say anything.
    #[test]
    fn any_report_is_stored_or_refused() {
        let mirror = Mirror::new(1 << 20).unwrap();
        let capture = Capture { mirror: mirror.number, number: 3, written: vec![10..20, 4096..8192] };
        let report =
            |regions, capture| GpuReport { regions, capture, parked_bytes: 7, ..GpuReport::default() };
        let samples = [
            report(vec![region(1000, 24), region(10, 5), region(4096, 1 << 19)], Some(Box::new(capture))),
            report(vec![region(0, 1 << 20)], None),
        ];
        let samples = samples.map(|report| serde_json::to_vec(&report).unwrap());
        ckpt_test_mutate::mutations(&samples, |bytes| {
            let Ok(report) = serde_json::from_slice::<GpuReport>(bytes) else { return };
            let process = Process { pid: Some(5), host_pid: None, exe: String::new() };
            mirror.history.lock().record_capture(report.capture.as_deref());
            let states = [GpuState {
                process,
                mirror: Some(mirror.clone()),
                report,
                gpus: Vec::new(),
                supports_loads: true,
            }];
            let _ = outcome(&states, u64::MAX);
            for stored in to_store(&states).iter().flatten() {
                assert!(stored.content.bytes() <= 1 << 20);
                let mut whole = vec![1; usize::try_from(stored.content.bytes()).unwrap()];
                stored.content.read_at(0, &mut whole).unwrap();
                stored.content.known(0..4096);
            }
        });
    }

    #[test]
    fn device_memory_is_summarized() {
        assert_eq!(outcome(&[state(5, None, Vec::new())], 0), None);
        let mut states =
            [state(5, None, vec![region(0, 100), region(0, u64::MAX)]), state(6, None, vec![region(0, 8)])];
        states[0].report.parked_bytes = 60;
        states[1].report.unparked_because = Some("nothing is exported".to_owned());
        let outcome = outcome(&states, 8).unwrap();
        assert_eq!((outcome.processes, outcome.bytes, outcome.parked_bytes), (2, u64::MAX, 60));
        assert_eq!(outcome.copied_back_bytes, 8);
        assert_eq!(outcome.not_parked_because.unwrap(), "process 6: nothing is exported");
    }
}
