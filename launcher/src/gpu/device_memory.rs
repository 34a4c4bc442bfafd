//! Device memory in snapshots: from mirrors to the store, and from the store to mirrors.
//!
//! The used parts of a process's mirror become `gpu/PID.mem`, and its agent's report becomes `gpu/PID.json`.

use crate::agents::{GpuState, Mirror, Process, UnchangedChunks, merge_ranges};
use crate::sys::memory;
use anyhow::{Context, Result, bail};
use ckpt_protocol::agent::{GpuReport, Region};
use ckpt_protocol::control::DeviceMemory;
use ckpt_snapshot::chunk::ChunkId;
use ckpt_snapshot::{Damage, DataFile, GpuProcess, Manifest, ReadError, RelPath, Source, Store, Target};
use rustix::fs::FallocateFlags;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};

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
    /// `None` for a process without a mirror, which has no extents.
    mirror: Option<Mirror>,
    extents: Vec<Range<u64>>,
    /// The number of the capture that wrote the content.
    capture: Option<u64>,
    /// Chunks that need not be read.
    unchanged: Option<UnchangedChunks>,
    read_bytes: AtomicU64,
}

impl MirrorContent {
    fn of(state: &GpuState) -> Result<Self, ReportError> {
        let capture = state.report.capture.as_ref().map(|capture| capture.number);
        let unchanged = state.mirror.as_ref().and_then(|mirror| mirror.history.lock().unchanged_in(capture));
        let (mirror, extents) = (state.mirror.clone(), extents(state)?);
        Ok(Self { mirror, extents, capture, unchanged, read_bytes: AtomicU64::new(0) })
    }
}

impl Source for MirrorContent {
    fn bytes(&self) -> u64 {
        self.extents.last().map_or(0, |last| last.end)
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
            self.mirror.as_ref().ok_or(io::ErrorKind::NotFound)?.file.read_exact_at(part, from)?;
            position = from + part.len() as u64;
            rest = after;
        }
        rest.fill(0);
        Ok(())
    }

    fn known(&self, range: Range<u64>) -> Option<ChunkId> {
        self.unchanged.as_ref()?.chunk(&range, &self.extents)
    }
}

/// The device memory of a process, ready to be stored.
pub struct StoredProcess {
    /// Its entry in the manifest.
    pub process: GpuProcess,
    content: MirrorContent,
    report: Vec<u8>,
}

impl StoredProcess {
    /// Its data files.
    pub fn sources(&self) -> impl Iterator<Item = (&RelPath, &dyn Source)> {
        let memory = self.process.memory.as_ref().map(|path| (path, &self.content as &dyn Source));
        memory.into_iter().chain([(&self.process.report, &self.report as &dyn Source)])
    }

    /// Memory that was not read because the store had it already, bytes.
    #[must_use]
    pub fn unread_bytes(&self) -> u64 {
        self.content.bytes().saturating_sub(self.content.read_bytes.load(Ordering::Relaxed))
    }

    /// Records that the snapshot was committed: chunks that do not change until the next capture need not be read again.
    pub fn record_commit(&self, manifest: &Manifest) {
        let MirrorContent { mirror: Some(mirror), extents, capture, .. } = &self.content else { return };
        let file = self.process.memory.as_ref().and_then(|path| data_file(manifest, path));
        if let Some(file) = file {
            mirror.history.lock().record_commit(*capture, extents.clone(), file);
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
        let path = |kind: &str| RelPath::new(format!("gpu/{pid}.{kind}")).expect("a plain path");
        let content = MirrorContent::of(state)?;
        let mirror = state.mirror.as_ref();
        let report = serde_json::to_vec(&state.report).map_err(StoreDeviceMemoryError::Encode)?;
        let process = GpuProcess {
            pid,
            mirror: mirror.map_or(0, |mirror| mirror.number),
            mirror_bytes: mirror.map_or(0, |mirror| mirror.bytes),
            memory: (!content.extents.is_empty()).then(|| path("mem")),
            report: path("json"),
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
        not_parked_because: not_parked,
    };
    (outcome.processes > 0).then_some(outcome)
}

/// The mirror of a process in a snapshot, and the data file of its content.
pub struct Load {
    /// The process, as the job itself sees it.
    pub pid: u32,
    /// Its mirror, not loaded yet.
    pub mirror: Mirror,
    /// The data file.
    memory: Option<RelPath>,
    /// The length of the data file.
    pub bytes: u64,
}

/// Creates the mirrors of a snapshot's processes.
///
/// # Errors
/// When there is not enough memory, and [`ReadError::Damaged`] when the manifest is inconsistent.
pub fn plan(manifest: &Manifest) -> Result<Vec<Load>> {
    let mut loads = Vec::new();
    for process in manifest.gpu.iter().filter(|process| process.mirror_bytes > 0) {
        let file = process.memory.as_ref().and_then(|path| data_file(manifest, path));
        let bytes = file.map_or(0, |file| file.bytes);
        if bytes > process.mirror_bytes {
            let damage = format!("{bytes} bytes are to go into a mirror of {}", process.mirror_bytes);
            bail!(ReadError::Damaged { id: manifest.id.to_string(), damage: Damage::Manifest(damage) });
        }
        let mirror = Mirror::to_be_filled(process.mirror, process.mirror_bytes)
            .context("cannot create a file for device memory")?;
        loads.push(Load { pid: process.pid, mirror, memory: process.memory.clone(), bytes });
    }
    let needed_bytes = loads.iter().map(|load| load.mirror.bytes).fold(0, u64::saturating_add);
    let available_bytes = memory::available_bytes().unwrap_or(0);
    if needed_bytes > 0 && needed_bytes.saturating_add(memory::SPARE_BYTES) > available_bytes {
        bail!(
            "not enough memory for the snapshot's {needed_bytes} bytes of device memory: {available_bytes} bytes are free. Free some memory, or use a machine or a container with more"
        );
    }
    Ok(loads)
}

impl Load {
    /// The data file and its target; `None` when there is nothing to load. The mirror must not be used before it is loaded
    /// and [`Load::finish`] has succeeded.
    #[must_use]
    pub fn wanted(&self) -> Option<(&RelPath, &dyn Target)> {
        self.memory.as_ref().map(|path| (path, self as &dyn Target))
    }

    /// Allocates the whole mirror, because it will be pinned: a lack of memory shows here.
    ///
    /// # Errors
    /// When the memory cannot be allocated.
    pub fn finish(&self) -> Result<(), ReadError> {
        let Some(path) = &self.memory else { return Ok(()) };
        let allocated =
            rustix::fs::fallocate(&*self.mirror.file, FallocateFlags::empty(), 0, self.mirror.bytes);
        allocated.map_err(|error| ReadError::Target { path: path.to_string(), source: error.into() })
    }
}

/// The mirror keeps its own size: the part after the loaded content is unused.
impl Target for Load {
    fn set_bytes(&self, _bytes: u64) -> io::Result<()> {
        self.mirror.file.set_len(0)?;
        self.mirror.file.set_len(self.mirror.bytes)
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.mirror.file.write_all_at(bytes, offset)
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
        GpuState { process, mirror, report: GpuReport { regions, ..GpuReport::default() } }
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
        let medium = Arc::new(DirMedium::new(dir.path().to_owned()));
        let snapshots = PackStore::new(medium, Codec::default(), Limits::default());
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
        assert_eq!(read_report(&snapshots, &saved, &saved.gpu[0]).unwrap(), states[0].report);

        let loads = plan(&saved).unwrap();
        assert_eq!(loads.len(), 1);
        let (path, into) = loads[0].wanted().unwrap();
        snapshots.load(&saved, &[ckpt_snapshot::Load { path, into }], &|_| {}).unwrap();
        loads[0].finish().unwrap();
        let loaded = &loads[0].mirror;
        assert_eq!((loaded.number, loaded.bytes), (mirror.number, mirror.bytes));
        assert_eq!(loaded.file.metadata().unwrap().len(), mirror.bytes);
        let mut found = [0; 13];
        loaded.file.read_exact_at(&mut found, 5 << 20).unwrap();
        assert_eq!(&found, b"device memory");

        let mut wrong = saved.clone();
        wrong.gpu[0].mirror_bytes = 4 << 20;
        let error = plan(&wrong).err().unwrap();
        assert!(matches!(error.downcast_ref(), Some(ReadError::Damaged { .. })), "{error:?}");
        let mut large = saved;
        large.gpu[0].mirror_bytes = 1 << 60;
        large.files[0].bytes = 1 << 59;
        let error = plan(&large).err().unwrap().to_string();
        assert!(error.contains("bytes are free"), "{error}");
    }

    /// Saves the state; returns the stored content, read back, and how many bytes were not read for saving.
    fn saved(store: &dyn Store, sequence: u64, state: &GpuState, is_committed: bool) -> (Vec<u8>, u64) {
        let [stored] = &to_store(std::slice::from_ref(state)).unwrap()[..] else { panic!("one process") };
        let id = ckpt_snapshot::SnapshotId::new(sequence, std::time::SystemTime::UNIX_EPOCH);
        let manifest = Manifest { id, ..crate::checkpoint::attempt::tests::manifest(Vec::new()) };
        let mut writer = store.begin(&manifest.id, 100).unwrap();
        let inputs = stored.sources().map(|(path, from)| Input { path: path.clone(), from });
        writer.put(&inputs.collect::<Vec<_>>(), &|_| {}).unwrap();
        let manifest = writer.commit(manifest).unwrap();
        if is_committed {
            stored.record_commit(&manifest);
        }
        let memory = store.read(&manifest, stored.process.memory.as_ref().unwrap()).unwrap();
        (memory, stored.unread_bytes())
    }

    #[test]
    fn unchanged_memory_is_not_read_again() {
        const CHUNK: u64 = ckpt_snapshot::chunk::CHUNK_BYTES as u64;
        let dir = tempfile::tempdir().unwrap();
        let store = PackStore::new(
            Arc::new(DirMedium::new(dir.path().to_owned())),
            Codec::default(),
            Limits::default(),
        );
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
            let states = [GpuState { process, mirror: Some(mirror.clone()), report }];
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
