//! Device memory in snapshots: from mirrors to the store, and from the store to mirrors.
//!
//! A process's mirror becomes `gpu/PID.mem`, as far as something lies in it, and what its agent told of it
//! `gpu/PID.json`.

use crate::agents::{GpuState, Mirror, Process};
use crate::checkpoint::AttemptError;
use crate::staging;
use anyhow::{Context, Result, bail};
use ckpt_protocol::agent::GpuReport;
use ckpt_protocol::control::DeviceMemory;
use ckpt_snapshot::{Damage, GpuProcess, Manifest, ReadError, RelPath, SparseWriter, Store};
use rustix::fs::FallocateFlags;
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::ops::Range;
use std::os::unix::fs::FileExt;

/// An agent has told of memory that is not in its mirror.
#[derive(Debug, thiserror::Error)]
#[error(
    "the interposer in {process} made a mistake: it speaks of {told_bytes} bytes of device memory, its mirror has {mirror_bytes}. Please report it"
)]
pub struct ReportError {
    /// The process.
    process: Process,
    /// Where the last region ends.
    told_bytes: u64,
    /// Size of the mirror.
    mirror_bytes: u64,
}

/// Where in a mirror something lies: in order, without overlaps.
fn extents(state: &GpuState) -> Result<Vec<Range<u64>>, ReportError> {
    let regions = state.report.regions.iter().filter(|region| region.bytes > 0);
    let mut found: Vec<_> =
        regions.map(|region| region.offset..region.offset.saturating_add(region.bytes)).collect();
    found.sort_by_key(|extent| extent.start);
    let mut joined: Vec<Range<u64>> = Vec::new();
    for extent in found {
        match joined.last_mut() {
            Some(last) if extent.start <= last.end => last.end = last.end.max(extent.end),
            _ => joined.push(extent),
        }
    }
    let told_bytes = joined.last().map_or(0, |last| last.end);
    let mirror_bytes = state.mirror.as_ref().map_or(0, |mirror| mirror.bytes);
    if told_bytes <= mirror_bytes {
        return Ok(joined);
    }
    Err(ReportError { process: state.process.clone(), told_bytes, mirror_bytes })
}

/// The content of a mirror from its beginning to the last thing that lies in it. What lies between is nobody's, and
/// reads as zeroes.
struct Content<'a> {
    file: &'a File,
    /// Those that are not read yet.
    extents: std::iter::Peekable<std::slice::Iter<'a, Range<u64>>>,
    position: u64,
}

impl<'a> Content<'a> {
    fn new(file: &'a File, extents: &'a [Range<u64>]) -> Self {
        Self { file, extents: extents.iter().peekable(), position: 0 }
    }
}

impl Read for Content<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.extents.next_if(|extent| extent.end <= self.position).is_some() {}
        let Some(extent) = self.extents.peek() else { return Ok(0) };
        let is_gap = self.position < extent.start;
        let left_bytes = if is_gap { extent.start } else { extent.end } - self.position;
        let bytes = usize::try_from(left_bytes).unwrap_or(usize::MAX).min(buffer.len());
        let buffer = &mut buffer[..bytes];
        let read = if is_gap {
            buffer.fill(0);
            bytes
        } else {
            self.file.read_at(buffer, self.position)?
        };
        if read == 0 && bytes > 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        self.position += read as u64;
        Ok(read)
    }
}

/// How many bytes [`store`] will store of what processes had on their GPUs.
///
/// # Errors
/// See [`ReportError`].
pub fn stored_bytes(states: &[GpuState]) -> Result<u64, ReportError> {
    states.iter().map(|state| Ok(extents(state)?.last().map_or(0, |last| last.end))).sum()
}

/// Stores what processes had on their GPUs; `put` takes each data file.
///
/// # Errors
/// See [`ReportError`], and those of `put`.
pub fn store(
    states: &[GpuState],
    put: &mut dyn FnMut(&RelPath, &mut dyn Read) -> Result<(), AttemptError>,
) -> Result<Vec<GpuProcess>, AttemptError> {
    let mut stored = Vec::new();
    for state in states {
        let Some(pid) = state.process.pid else { continue };
        let path = |kind: &str| {
            RelPath::new(format!("gpu/{pid}.{kind}"))
                .map_err(|error| AttemptError::Staging(io::Error::other(error)))
        };
        let (memory, report) = (path("mem")?, path("json")?);
        let extents = extents(state)?;
        let mirror = state.mirror.as_ref();
        let is_used = mirror.filter(|_| !extents.is_empty());
        if let Some(mirror) = is_used {
            put(&memory, &mut Content::new(&mirror.file, &extents))?;
        }
        let text = serde_json::to_vec(&state.report).map_err(|error| AttemptError::Staging(error.into()))?;
        put(&report, &mut &text[..])?;
        stored.push(GpuProcess {
            pid,
            mirror: mirror.map_or(0, |mirror| mirror.number),
            mirror_bytes: mirror.map_or(0, |mirror| mirror.bytes),
            memory: is_used.map(|_| memory),
            report,
        });
    }
    Ok(stored)
}

/// What a checkpoint did with device memory; `None` if there was none.
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
        changed_bytes: regions().map(|region| region.changed_bytes).sum(),
        parked_bytes: reports().map(|report| report.parked_bytes).fold(0, u64::saturating_add),
        copied_back_bytes,
        not_parked_because: not_parked,
    };
    (outcome.processes > 0).then_some(outcome)
}

/// A mirror that a snapshot's process will ask for, and the data file of its content.
pub struct Load {
    /// The process, as the job itself sees it.
    pub pid: u32,
    /// Its mirror, still empty.
    pub mirror: Mirror,
    /// The data file.
    memory: Option<RelPath>,
    /// Its length.
    pub bytes: u64,
}

/// Makes the mirrors of a snapshot's processes.
///
/// # Errors
/// Too little memory. And [`ReadError::Damaged`], when the manifest contradicts itself.
pub fn plan(manifest: &Manifest) -> Result<Vec<Load>> {
    let mut loads = Vec::new();
    for process in manifest.gpu.iter().filter(|process| process.mirror_bytes > 0) {
        let file = |path: &RelPath| manifest.files.iter().find(|file| &file.path == path);
        let bytes = process.memory.as_ref().and_then(file).map_or(0, |file| file.bytes);
        if bytes > process.mirror_bytes {
            let damage = format!("{bytes} bytes are to go into a mirror of {}", process.mirror_bytes);
            bail!(ReadError::Damaged { id: manifest.id.to_string(), damage: Damage::Manifest(damage) });
        }
        let mirror = Mirror::to_be_filled(process.mirror, process.mirror_bytes)
            .context("cannot make a place for device memory")?;
        loads.push(Load { pid: process.pid, mirror, memory: process.memory.clone(), bytes });
    }
    let needed_bytes = loads.iter().map(|load| load.mirror.bytes).fold(0, u64::saturating_add);
    let available_bytes = staging::available_bytes().unwrap_or(0);
    if needed_bytes > 0 && needed_bytes.saturating_add(staging::SPARE_BYTES) > available_bytes {
        bail!(
            "the snapshot has {needed_bytes} bytes of device memory, for which there is not enough memory: {available_bytes} bytes are free. Free some, or take a machine or a container with more"
        );
    }
    Ok(loads)
}

/// Fills a mirror. It is not to be used before this has returned without an error.
///
/// # Errors
/// Damage, or the memory cannot be had.
pub fn load(
    store: &dyn Store,
    manifest: &Manifest,
    load: &Load,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<(), ReadError> {
    let Some(path) = &load.memory else { return Ok(()) };
    let failed = |source| ReadError::Io { step: "take memory for", path: path.as_str().into(), source };
    let mut file = load.mirror.file.try_clone().map_err(failed)?;
    let mut sparse = SparseWriter::new(&mut file);
    store.read(manifest, path, &mut sparse, progress)?;
    sparse.finish().and_then(|()| file.set_len(load.mirror.bytes)).map_err(failed)?;
    // All of it is pinned in the end: what is short of memory is to learn it here.
    let taken = rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, load.mirror.bytes);
    taken.map_err(|error| failed(error.into()))
}

/// What the agent of a process told of its device memory.
///
/// # Errors
/// Damage.
pub fn read_report(store: &dyn Store, manifest: &Manifest, process: &GpuProcess) -> Result<GpuReport> {
    let file = store.open(manifest, &process.report)?;
    serde_json::from_reader(io::BufReader::new(file))
        .with_context(|| format!("{} of the snapshot {} does not read", process.report, manifest.id))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ckpt_protocol::agent::{Region, RegionKind};
    use ckpt_snapshot::DirStore;

    fn region(offset: u64, bytes: u64) -> Region {
        let kind = RegionKind::Allocation;
        Region { address: 0, bytes, device: 0, kind, allocations: 1, offset, changed_bytes: Some(bytes / 2) }
    }

    fn state(pid: u32, mirror: Option<Mirror>, regions: Vec<Region>) -> GpuState {
        let process = Process { pid: Some(pid), host_pid: None, exe: String::new() };
        GpuState { process, mirror, report: GpuReport { regions, ..GpuReport::default() } }
    }

    fn content(state: &GpuState) -> Vec<u8> {
        let extents = extents(state).unwrap();
        let mut content = Vec::new();
        let file = state.mirror.as_ref().unwrap();
        Content::new(&file.file, &extents).read_to_end(&mut content).unwrap();
        content
    }

    #[test]
    fn only_what_is_in_use_is_stored() {
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
        let two = [some(vec![region(0, 100)]), some(vec![region(1000, 24)]), state(6, None, Vec::new())];
        assert_eq!(stored_bytes(&two).unwrap(), 1124);
    }

    #[test]
    fn memory_that_is_not_in_the_mirror_is_a_mistake() {
        let mirror = Mirror::new(2 << 20).unwrap();
        let whole = state(5, Some(mirror.clone()), vec![region(1 << 20, 1 << 20)]);
        assert!(stored_bytes(&[whole]).is_ok());
        let wrong = [
            state(5, Some(mirror.clone()), vec![region(1 << 20, (1 << 20) + 1)]),
            state(5, Some(mirror), vec![region(u64::MAX, u64::MAX)]),
            state(5, None, vec![region(0, 1)]),
        ];
        for state in wrong {
            let error = stored_bytes(&[state]).unwrap_err().to_string();
            assert!(error.contains("process 5") && error.contains("its mirror has"), "{error}");
        }
    }

    #[test]
    fn what_was_stored_is_loaded_into_the_same_mirror() {
        let dir = tempfile::tempdir().unwrap();
        let snapshots = DirStore::new(dir.path().join("snapshots"));
        let mirror = Mirror::new(6 << 20).unwrap();
        mirror.file.write_all_at(b"device memory", 5 << 20).unwrap();
        let states = [state(5, Some(mirror.clone()), vec![region(5 << 20, 13)]), state(6, None, Vec::new())];
        let manifest = crate::checkpoint::tests::manifest(Vec::new());
        let mut writer = snapshots.begin(&manifest.id, 100).unwrap();
        let gpu = store(&states, &mut |path, from| Ok(writer.put(path, from, &|_| {})?)).unwrap();
        let saved =
            writer.commit(Manifest { version: Manifest::version_for(&gpu), gpu, ..manifest }).unwrap();
        let paths: Vec<_> = saved.files.iter().map(|file| file.path.as_str()).collect();
        assert_eq!(paths, ["gpu/5.mem", "gpu/5.json", "gpu/6.json"]);
        assert_eq!(read_report(&snapshots, &saved, &saved.gpu[0]).unwrap(), states[0].report);

        let loads = plan(&saved).unwrap();
        assert_eq!(loads.len(), 1);
        load(&snapshots, &saved, &loads[0], &|_| {}).unwrap();
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

    #[test]
    fn a_checkpoint_is_summed_up() {
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
