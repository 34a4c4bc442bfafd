//! Multicast objects: a team of devices, and the memory of each that one address stands for.
//!
//! An object is a file in the machine's directory, so that all processes share it: who holds an object has a shared lock
//! on its file, as with a segment. All numbers are little-endian words of 64 bits.
//!
//! | word | |
//! |---|---|
//! | 0 | magic `SIMMCST1` (the last byte is the version) |
//! | 1 | ID |
//! | 2 | size of the object |
//! | 3 | handle types it may be exported as |
//! | 4 | how many devices the team is to have |
//! | 5 | the devices that were added, a bit each |
//! | 6 | number of bindings, and then for each: device, offset in the object, size, ID of the segment, size of the segment, offset in it |

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use cuda_abi::sys::CUresult;
use rustix::fs::{FlockOperation, flock};
use simcuda_machine::{Counters, own_directory};

use super::ledger;
use super::segment::{Pages, Segment};
use crate::error::Result;
use crate::handle;

const MAGIC: u64 = u64::from_le_bytes(*b"SIMMCST1");
const HEADER_WORDS: usize = 7;
const BOUND_WORDS: usize = 6;
const FILE_BYTES: usize = 64 << 10;
const OBJECT_PREFIX: &str = "object-";
/// How often a call looks whether the team is complete.
const TEAM_POLL_INTERVAL: Duration = Duration::from_millis(1);

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

static DIRECTORY: OnceLock<PathBuf> = OnceLock::new();

/// Opens the directory of the objects; part of cuInit.
pub(super) fn start(machine: &Path) -> io::Result<()> {
    let directory = DIRECTORY.get_or_init(|| machine.join("multicast"));
    own_directory(directory)?;
    // Objects of processes that ended without releasing them.
    under_lock(|_| {
        for entry in std::fs::read_dir(directory)? {
            let name = entry?.file_name();
            let id = name.to_str().and_then(|name| name.strip_prefix(OBJECT_PREFIX));
            if let Some(id) = id.and_then(|id| u64::from_str_radix(id, 16).ok()) {
                bury(id)?;
            }
        }
        Ok(())
    })
}

fn directory() -> io::Result<&'static PathBuf> {
    DIRECTORY.get().ok_or_else(|| io::Error::other("the driver is not initialised"))
}

fn path_of(id: u64) -> io::Result<PathBuf> {
    Ok(directory()?.join(format!("{OBJECT_PREFIX}{id:016x}")))
}

fn open(id: u64) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open(path_of(id)?)
}

/// Keeps all other processes and threads from the objects while `body` runs.
fn under_lock<T>(body: impl FnOnce(&mut Counters) -> io::Result<T>) -> io::Result<T> {
    simcuda_machine::under_lock(directory()?, "lock", body)
}

/// Removes an object that nobody holds.
fn bury(id: u64) -> io::Result<()> {
    let file = match open(id) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        file => file?,
    };
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(()),
        Err(error) => Err(error.into()),
        Ok(()) => std::fs::remove_file(path_of(id)?),
    }
}

/// Memory that is bound to a part of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bound {
    /// The ID of its GPU.
    pub(super) gpu: i32,
    pub(super) offset: u64,
    pub(super) size_bytes: u64,
    pub(super) segment: u64,
    pub(super) segment_bytes: u64,
    pub(super) segment_offset: u64,
}

impl Bound {
    pub(super) fn overlaps(&self, offset: u64, size_bytes: u64) -> bool {
        self.offset < offset + size_bytes && offset < self.offset + self.size_bytes
    }

    /// Whether the memory is still there: the process that bound it may have been killed. That of a GPU that this process
    /// does not see counts as there.
    fn is_alive(&self) -> bool {
        let memory = ledger::device_of_gpu(self.gpu).and_then(ledger::device);
        memory.map_or(true, |memory| memory.open_segment(self.segment).is_ok())
    }
}

/// An object as its file describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Record {
    id: u64,
    pub(super) size_bytes: u64,
    pub(super) handle_types: u32,
    pub(super) team_size: u32,
    /// A bit for each GPU's ID.
    pub(super) gpus: u64,
    pub(super) bound: Vec<Bound>,
}

impl Record {
    pub(super) fn has(&self, gpu: i32) -> bool {
        (0..64).contains(&gpu) && self.gpus >> gpu & 1 == 1
    }

    pub(super) fn is_complete(&self) -> bool {
        self.gpus.count_ones() == self.team_size
    }

    /// Forgets what processes had bound that have ended.
    pub(super) fn prune(&mut self) {
        self.bound.retain(Bound::is_alive);
    }

    fn encode(&self) -> Option<Vec<u8>> {
        let header = [
            MAGIC,
            self.id,
            self.size_bytes,
            self.handle_types.into(),
            self.team_size.into(),
            self.gpus,
            self.bound.len() as u64,
        ];
        let bound = self.bound.iter().flat_map(|one| {
            let gpu = u64::from(one.gpu.cast_unsigned());
            [gpu, one.offset, one.size_bytes, one.segment, one.segment_bytes, one.segment_offset]
        });
        let bytes: Vec<u8> = header.into_iter().chain(bound).flat_map(u64::to_le_bytes).collect();
        (bytes.len() <= FILE_BYTES).then_some(bytes)
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let (words, _) = bytes.as_chunks::<8>();
        let words: Vec<u64> = words.iter().copied().map(u64::from_le_bytes).collect();
        let (header, rest) = words.split_first_chunk::<HEADER_WORDS>()?;
        let [MAGIC, id, size_bytes, handle_types, team_size, gpus, count] = *header else { return None };
        let (bound, _) = rest.as_chunks::<BOUND_WORDS>();
        let bound = bound.get(..usize::try_from(count).ok()?)?;
        let bound = bound.iter().map(|[gpu, offset, size_bytes, segment, segment_bytes, segment_offset]| {
            Some(Bound {
                gpu: i32::try_from(*gpu).ok()?,
                offset: *offset,
                size_bytes: *size_bytes,
                segment: *segment,
                segment_bytes: *segment_bytes,
                segment_offset: *segment_offset,
            })
        });
        Some(Self {
            id,
            size_bytes,
            handle_types: u32::try_from(handle_types).ok()?,
            team_size: u32::try_from(team_size).ok()?,
            gpus,
            bound: bound.collect::<Option<_>>()?,
        })
    }

    fn read(file: &File) -> io::Result<Self> {
        let mut bytes = vec![0; FILE_BYTES];
        file.read_exact_at(&mut bytes, 0)?;
        Self::decode(&bytes).ok_or_else(|| io::Error::other("the multicast object is damaged"))
    }
}

/// A multicast object that this process holds. It lives while a handle, a mapping, a binding or an exported descriptor
/// refers to it, in any process.
pub(super) struct Multicast {
    id: u64,
    pub(super) size_bytes: u64,
    pub(super) handle_types: u32,
    /// The value of the handles that stand for it, as a segment's.
    pub(super) handle: u64,
    pub(super) is_imported: bool,
    /// The mapping keeps the open file description with its shared lock. `None` only while it is dropped.
    pages: Option<Pages>,
}

/// What this process has bound to an object.
pub(super) struct Binding {
    pub(super) object: Arc<Multicast>,
    /// The ID of the memory's GPU.
    pub(super) gpu: i32,
    pub(super) offset: u64,
    pub(super) size_bytes: u64,
    /// Lives as long as it is bound.
    pub(super) segment: Arc<Segment>,
}

impl Multicast {
    pub(super) fn create(size_bytes: u64, handle_types: u32, team_size: u32) -> Result<Arc<Self>> {
        under_lock(|counters| {
            let id = counters.next_id;
            counters.next_id += 1;
            let mut options = OpenOptions::new();
            let file = options.read(true).write(true).create_new(true).mode(0o600).open(path_of(id)?)?;
            flock(&file, FlockOperation::LockShared)?;
            let record = Record { id, size_bytes, handle_types, team_size, gpus: 0, bound: Vec::new() };
            file.set_len(FILE_BYTES as u64)?;
            file.write_all_at(&record.encode().unwrap_or_default(), 0)?;
            Self::hold(&file, &record, false)
        })
        .map_err(ledger::failed)
    }

    fn hold(file: &File, record: &Record, is_imported: bool) -> io::Result<Arc<Self>> {
        let pages = Pages::of_file(file, FILE_BYTES as u64)?;
        Ok(Arc::new(Self {
            id: record.id,
            size_bytes: record.size_bytes,
            handle_types: record.handle_types,
            handle: handle::fresh() as u64,
            is_imported,
            pages: Some(pages),
        }))
    }

    /// The object of a descriptor that [`Multicast::export`] made; none for any other descriptor.
    pub(super) fn import(descriptor: OwnedFd) -> Option<Arc<Self>> {
        let file = File::from(descriptor);
        let imported = under_lock(|_| {
            let record = Record::read(&file)?;
            let (theirs, known) = (file.metadata()?, path_of(record.id)?.symlink_metadata()?);
            if (theirs.dev(), theirs.ino()) != (known.dev(), known.ino()) {
                return Err(io::Error::other("it is no multicast object"));
            }
            flock(&file, FlockOperation::NonBlockingLockShared)?;
            Self::hold(&file, &record, true)
        });
        imported.ok()
    }

    /// A descriptor that keeps the object alive as long as it is open anywhere.
    pub(super) fn export(&self) -> Result<OwnedFd> {
        let open = under_lock(|_| {
            let file = open(self.id)?;
            flock(&file, FlockOperation::LockShared)?;
            Ok(file)
        });
        open.map(OwnedFd::from).map_err(ledger::failed)
    }

    /// The object as it is now.
    pub(super) fn record(&self) -> Result<Record> {
        under_lock(|_| Record::read(&open(self.id)?)).map_err(ledger::failed)
    }

    /// Changes it for all processes, unless `body` fails.
    ///
    /// # Errors
    /// That of `body`; `CUDA_ERROR_OUT_OF_MEMORY` for too many bindings.
    pub(super) fn change(&self, body: impl FnOnce(&mut Record) -> Result) -> Result {
        under_lock(|_| {
            let file = open(self.id)?;
            let mut record = Record::read(&file)?;
            if let Err(error) = body(&mut record) {
                return Ok(Err(error));
            }
            let Some(bytes) = record.encode() else { return Ok(Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY)) };
            file.write_all_at(&bytes, 0).map(Ok)
        })
        .map_err(ledger::failed)?
    }

    /// Waits until all devices have been added: binding memory and mapping the object block until then (CUDA driver API
    /// reference, cuMulticastAddDevice).
    pub(super) fn wait_for_team(&self) -> Result<Record> {
        loop {
            let record = self.record()?;
            if record.is_complete() {
                return Ok(record);
            }
            std::thread::sleep(TEAM_POLL_INTERVAL);
        }
    }

    /// Adds the device that is this GPU, for the life of the object.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if it is one of the team, or the team is complete.
    pub(super) fn add_device(&self, gpu: i32) -> Result {
        self.change(|record| {
            if record.is_complete() || record.has(gpu) {
                return Err(INVALID);
            }
            record.gpus |= 1 << gpu;
            Ok(())
        })
    }
}

impl Drop for Multicast {
    fn drop(&mut self) {
        self.pages = None;
        if let Err(error) = under_lock(|_| bury(self.id)) {
            // The file stays until the next cuInit.
            ledger::failed(error);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_as_it_was_written() {
        let bound = Bound {
            gpu: 3,
            offset: 2 << 20,
            size_bytes: 4 << 20,
            segment: 77,
            segment_bytes: 8 << 20,
            segment_offset: 2 << 20,
        };
        let record = Record {
            id: 5,
            size_bytes: 1 << 30,
            handle_types: 1,
            team_size: 2,
            gpus: 9,
            bound: vec![bound; 2],
        };
        let bytes = record.encode().unwrap();
        assert_eq!(Record::decode(&bytes), Some(record.clone()));
        assert_eq!(Record::decode(&bytes[..bytes.len() - 1]), None, "a binding is cut off");
        assert_eq!(Record::decode(&bytes[1..]), None);
        assert_eq!(Record { bound: vec![bound; 2000], ..record }.encode(), None);
    }
}
