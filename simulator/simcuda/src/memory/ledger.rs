//! Each device's physical memory as all processes on it share it, see [`simcuda_machine::Ledger`].

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::sync::OnceLock;

use cuda_abi::sys::CUresult;
use parking_lot::RwLock;
use rustix::fs::{FlockOperation, flock};
use simcuda_machine::config::Config;
use simcuda_machine::{Counters, Gpu, Ledger, TRAILER_BYTES, Turn, Turns, device_file, own_directory};

use super::layout::Location;
use super::multicast;
use super::trailer::Trailer;
use crate::error::Result;

/// The memory of each device that the process sees, by ordinal. A restore may put other GPUs in their places.
static DEVICES: RwLock<Vec<&'static DeviceMemory>> = RwLock::new(Vec::new());
static HOST: OnceLock<DeviceMemory> = OnceLock::new();

/// Stands for the host where a GPU's ID is expected.
const HOST_ID: i32 = -1;

/// A device's memory, or the host's.
pub(crate) struct DeviceMemory {
    config: Config,
    ledger: Ledger,
    pub(super) capacity_bytes: u64,
    turns: Turns,
    /// The GPU's, which has the same one in every process.
    id: i32,
}

/// Opens the memory of these GPUs, which are the devices from now on.
///
/// # Errors
/// `CUDA_ERROR_OPERATING_SYSTEM` if the directory cannot be used; the reason is printed to standard error.
pub(super) fn use_gpus<'a>(config: &Config, gpus: impl Iterator<Item = &'a Gpu>) -> Result {
    let open = |gpu: &Gpu| Ok(&*Box::leak(Box::new(DeviceMemory::open(config, gpu)?)));
    let open_all = || {
        own_directory(&config.directory)?;
        let host = DeviceMemory::of_host(config)?;
        HOST.get_or_init(|| host);
        multicast::start(&config.directory)?;
        gpus.map(open).collect::<io::Result<_>>()
    };
    *DEVICES.write() = open_all().map_err(|error| {
        eprintln!("simcuda: cannot use {} for device memory: {error}", config.directory.display());
        CUresult::CUDA_ERROR_OPERATING_SYSTEM
    })?;
    Ok(())
}

/// The memory of all devices.
pub(super) fn devices() -> Vec<&'static DeviceMemory> {
    DEVICES.read().clone()
}

/// Physical memory at a location.
///
/// # Errors
/// `CUDA_ERROR_INVALID_DEVICE` for a device that does not exist.
pub(super) fn memory(location: Location) -> Result<&'static DeviceMemory> {
    match location {
        Location::Device(ordinal) => device(ordinal),
        Location::Host | Location::HostNode => HOST.get().ok_or(CUresult::CUDA_ERROR_NOT_INITIALIZED),
    }
}

/// The location of exported memory from the ID in its trailer. Of the host's memory, only that of a NUMA node can be
/// exported.
///
/// # Errors
/// As [`device_of_gpu`].
pub(super) fn location(id: i32) -> Result<Location> {
    if id == HOST_ID { Ok(Location::HostNode) } else { device_of_gpu(id).map(Location::Device) }
}

/// The memory of a device.
///
/// # Errors
/// `CUDA_ERROR_INVALID_DEVICE` for an ordinal that does not exist.
pub(super) fn device(ordinal: i32) -> Result<&'static DeviceMemory> {
    let index = usize::try_from(ordinal).map_err(|_| CUresult::CUDA_ERROR_INVALID_DEVICE)?;
    DEVICES.read().get(index).copied().ok_or(CUresult::CUDA_ERROR_INVALID_DEVICE)
}

/// The device that is a GPU, whose ordinal may be another one in another process.
///
/// # Errors
/// `CUDA_ERROR_INVALID_DEVICE` if the process does not see it.
pub(super) fn device_of_gpu(id: i32) -> Result<i32> {
    let position = DEVICES.read().iter().position(|memory| memory.gpu() == id);
    position.and_then(|at| i32::try_from(at).ok()).ok_or(CUresult::CUDA_ERROR_INVALID_DEVICE)
}

/// Waits until a kernel of this process may run on a device, see [`Turns::take`].
///
/// # Errors
/// As [`device`], and `CUDA_ERROR_OPERATING_SYSTEM`; the reason is printed to standard error.
pub(crate) fn take_turn(ordinal: i32, is_wanted: &dyn Fn() -> bool) -> Result<Option<Turn<'static>>> {
    device(ordinal)?.turns.take(is_wanted).map_err(failed)
}

/// A device has restored this process: its kernels take turns from now on.
///
/// # Errors
/// As [`take_turn`].
pub(crate) fn begin_turns(ordinal: i32) -> Result {
    device(ordinal)?.turns.begin().map_err(failed)
}

pub(super) fn failed(error: impl Into<io::Error>) -> CUresult {
    let error = error.into();
    eprintln!("simcuda: device memory: {error}");
    CUresult::CUDA_ERROR_OPERATING_SYSTEM
}

impl DeviceMemory {
    pub(super) fn open(config: &Config, gpu: &Gpu) -> io::Result<Self> {
        let ledger = Ledger::of(&config.directory, gpu.id);
        ledger.prepare()?;
        let id = i32::try_from(gpu.id).map_err(io::Error::other)?;
        let turns = Turns::of(&config.directory, gpu.id, config.switch_timeout);
        Ok(Self { config: config.clone(), ledger, capacity_bytes: gpu.memory_bytes, turns, id })
    }

    /// The host's memory, which is there as long as the machine runs.
    fn of_host(config: &Config) -> io::Result<Self> {
        let info = rustix::system::sysinfo();
        let capacity_bytes = info.totalram.saturating_mul(info.mem_unit.into());
        let ledger = Ledger::of_host(&config.directory);
        ledger.prepare()?;
        let turns = Turns::of(&config.directory, usize::MAX, config.switch_timeout);
        Ok(Self { config: config.clone(), ledger, capacity_bytes, turns, id: HOST_ID })
    }

    /// The GPU's ID, as handles have it.
    pub(super) fn gpu(&self) -> i32 {
        self.id
    }

    /// Opens the device's file. The device begins anew if nobody had it open.
    ///
    /// # Errors
    /// The kernel's.
    pub(super) fn open_file_of_device(&self) -> io::Result<File> {
        self.ledger.under_lock(|counters| self.start_if_unused(counters))
    }

    /// Closes the device's file; tears the device down if nobody else has it open.
    pub(super) fn close_file_of_device(&self, file: Option<File>) {
        let closed = self.ledger.under_lock(|counters| {
            drop(file);
            self.start_if_unused(counters).map(drop)
        });
        if let Err(error) = closed {
            failed(error);
        }
    }

    /// Opens the device's file, and buries all memory if nobody else has it open.
    fn start_if_unused(&self, counters: &mut Counters) -> io::Result<File> {
        let file = device_file::open(&self.config.directory, usize::try_from(self.id).unwrap_or(0))?;
        if !self.config.is_persistent && device_file::is_only_opener(&file)? {
            self.ledger.clear(counters)?;
            self.turns.end()?;
        }
        Ok(file)
    }

    /// Bytes in use by all processes, after the dead are buried.
    pub(super) fn used_bytes(&self) -> Result<u64> {
        self.ledger.used_bytes().map_err(failed)
    }

    /// A new segment's file, zeroed, with the shared lock held through the returned description.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` if the device has too little memory left.
    pub(super) fn create(&self, size_bytes: u64, handle_types: u32) -> Result<(u64, File)> {
        self.ledger
            .under_lock(|counters| {
                if counters.used_bytes.saturating_add(size_bytes) > self.capacity_bytes {
                    self.ledger.reconcile(counters)?;
                }
                if counters.used_bytes.saturating_add(size_bytes) > self.capacity_bytes {
                    return Ok(None);
                }
                let (id, file) = self.create_file(counters)?;
                flock(&file, FlockOperation::LockShared)?;
                let trailer = Trailer { id, size_bytes, device: self.gpu(), handle_types };
                // Sparse: memory that is never touched costs the host nothing.
                let written = file
                    .set_len(size_bytes + TRAILER_BYTES as u64)
                    .and_then(|()| file.write_all_at(&trailer.encode(), size_bytes));
                if let Err(error) = written {
                    std::fs::remove_file(self.ledger.path(id))?;
                    return Err(error);
                }
                counters.used_bytes += size_bytes;
                Ok(Some((id, file)))
            })
            .map_err(failed)?
            .ok_or(CUresult::CUDA_ERROR_OUT_OF_MEMORY)
    }

    fn create_file(&self, counters: &mut Counters) -> io::Result<(u64, File)> {
        loop {
            let id = counters.next_id;
            counters.next_id += 1;
            let mut options = OpenOptions::new();
            match options.read(true).write(true).create_new(true).mode(0o600).open(self.ledger.path(id)) {
                // A ledger that was lost and begun anew counts from the start again.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                result => return result.map(|file| (id, file)),
            }
        }
    }

    /// Another description of a segment's file, with its shared lock.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if there is no such segment (any more).
    pub(super) fn open_segment(&self, id: u64) -> Result<(Trailer, File)> {
        self.ledger
            .under_lock(|_| {
                let file = match self.ledger.open_file(id) {
                    Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
                    file => file?,
                };
                let held = matches!(flock(&file, FlockOperation::NonBlockingLockExclusive), Err(error)
                if error == rustix::io::Errno::WOULDBLOCK);
                if !held {
                    return Ok(None);
                }
                flock(&file, FlockOperation::LockShared)?;
                Ok(Trailer::read(&file)?.map(|trailer| (trailer, file)))
            })
            .map_err(failed)?
            .filter(|(trailer, _)| trailer.id == id && trailer.device == self.gpu())
            .ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)
    }

    /// Whether the open file is the device's segment of this ID.
    pub(super) fn is_segment(&self, id: u64, file: &File) -> bool {
        let same = |a: &std::fs::Metadata, b: &std::fs::Metadata| a.dev() == b.dev() && a.ino() == b.ino();
        matches!((file.metadata(), self.ledger.path(id).symlink_metadata()), (Ok(a), Ok(b)) if same(&a, &b))
    }

    /// Frees a segment's memory if it has no holder left; called after the caller released its own hold.
    pub(super) fn release(&self, id: u64) {
        let result = self.ledger.under_lock(|counters| {
            let freed_bytes = self.ledger.bury(id)?;
            counters.used_bytes = counters.used_bytes.saturating_sub(freed_bytes);
            Ok(())
        });
        if let Err(error) = result {
            // The file stays until the next reconciliation.
            failed(error);
        }
    }
}
