//! One device's physical memory as all processes on it share it: the files that hold it and how much of it is
//! in use.
//!
//! A device is a directory. It has one file for each piece of physical memory in use (a segment), and the
//! ledger, whose exclusive flock guards the directory and which holds the number of bytes in use. Whoever
//! holds a segment, by a mapping or by a descriptor, holds a shared flock on its file: the lock belongs to the
//! open file description, which a mapping keeps after the descriptor is closed and which the kernel drops
//! with the process, however it ends. A file whose exclusive flock can be had is dead.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use cuda_abi::sys::CUresult;
use rustix::fs::{FlockOperation, flock};
use rustix::io::retry_on_intr;
use simcuda_machine::config::Config;
use simcuda_machine::{Counters, LEDGER, device_directory, device_file};

use super::trailer::{TRAILER_BYTES, Trailer};
use crate::error::Result;

const SEGMENT_PREFIX: &str = "segment-";

static DEVICES: OnceLock<Vec<DeviceMemory>> = OnceLock::new();

/// A device's memory.
pub(super) struct DeviceMemory {
    directory: PathBuf,
    pub(super) capacity_bytes: u64,
    ordinal: i32,
    /// Memory that only exported descriptors hold lives on when no process has the device open.
    is_persistent: bool,
}

/// Opens the devices' memory.
pub(super) fn start(config: &Config) -> Result {
    let open = || -> io::Result<Vec<DeviceMemory>> {
        own_directory(&config.directory)?;
        (0..config.devices)
            .map(|ordinal| {
                let directory = device_directory(&config.directory, ordinal);
                DeviceMemory::open(directory, config.memory_bytes, ordinal, config.is_persistent)
            })
            .collect()
    };
    let devices = open().map_err(|error| {
        eprintln!("simcuda: cannot use {} for device memory: {error}", config.directory.display());
        CUresult::CUDA_ERROR_OPERATING_SYSTEM
    })?;
    DEVICES.get_or_init(|| devices);
    Ok(())
}

/// The memory of all devices.
pub(super) fn devices() -> &'static [DeviceMemory] {
    DEVICES.get().map_or(&[], Vec::as_slice)
}

/// The memory of a device.
///
/// # Errors
/// `CUDA_ERROR_INVALID_DEVICE` for an ordinal that does not exist.
pub(super) fn device(ordinal: i32) -> Result<&'static DeviceMemory> {
    let index = usize::try_from(ordinal).map_err(|_| CUresult::CUDA_ERROR_INVALID_DEVICE)?;
    devices().get(index).ok_or(CUresult::CUDA_ERROR_INVALID_DEVICE)
}

/// Makes the directory if need be; it must be the user's own, for others' files would be trusted else.
fn own_directory(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)?;
    // SAFETY: geteuid has no preconditions.
    let user = unsafe { libc::geteuid() };
    let metadata = path.symlink_metadata()?;
    if !metadata.is_dir() || metadata.uid() != user {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, "it is not a directory of this user"));
    }
    Ok(())
}

fn failed(error: impl Into<io::Error>) -> CUresult {
    let error = error.into();
    eprintln!("simcuda: device memory: {error}");
    CUresult::CUDA_ERROR_OPERATING_SYSTEM
}

impl DeviceMemory {
    pub(super) fn open(
        directory: PathBuf,
        capacity_bytes: u64,
        ordinal: usize,
        is_persistent: bool,
    ) -> io::Result<Self> {
        let ordinal = i32::try_from(ordinal).map_err(io::Error::other)?;
        let memory = Self { directory, capacity_bytes, ordinal, is_persistent };
        own_directory(&memory.directory)?;
        memory.under_lock(|counters| memory.reconcile(counters))?;
        Ok(memory)
    }

    /// Opens the device's file. The device begins anew if nobody had it open.
    ///
    /// # Errors
    /// The kernel's.
    pub(super) fn open_file_of_device(&self) -> io::Result<File> {
        self.under_lock(|counters| self.start_if_unused(counters))
    }

    /// Closes the device's file; tears the device down if nobody else has it open.
    pub(super) fn close_file_of_device(&self, file: Option<File>) {
        let closed = self.under_lock(|counters| {
            drop(file);
            self.start_if_unused(counters).map(drop)
        });
        if let Err(error) = closed {
            failed(error);
        }
    }

    /// Opens the device's file, and buries all memory if nobody else has it open.
    fn start_if_unused(&self, counters: &mut Counters) -> io::Result<File> {
        let machine = self.directory.parent().unwrap_or(&self.directory);
        let file = device_file::open(machine, usize::try_from(self.ordinal).unwrap_or(0))?;
        if !self.is_persistent && device_file::is_only_opener(&file)? {
            for entry in std::fs::read_dir(&self.directory)? {
                let entry = entry?;
                if entry.file_name().as_encoded_bytes().starts_with(SEGMENT_PREFIX.as_bytes()) {
                    std::fs::remove_file(entry.path())?;
                }
            }
            counters.used_bytes = 0;
        }
        Ok(file)
    }

    /// Bytes in use by all processes, after the dead are buried.
    pub(super) fn used_bytes(&self) -> Result<u64> {
        self.under_lock(|counters| {
            self.reconcile(counters)?;
            Ok(counters.used_bytes)
        })
        .map_err(failed)
    }

    /// A new segment's file, zeroed, with the shared lock held through the returned description.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` if the device has too little memory left.
    pub(super) fn create(&self, size_bytes: u64, handle_types: u32) -> Result<(u64, File)> {
        self.under_lock(|counters| {
            if counters.used_bytes.saturating_add(size_bytes) > self.capacity_bytes {
                self.reconcile(counters)?;
            }
            if counters.used_bytes.saturating_add(size_bytes) > self.capacity_bytes {
                return Ok(None);
            }
            let (id, file) = self.create_file(counters)?;
            flock(&file, FlockOperation::LockShared)?;
            let trailer = Trailer { id, size_bytes, device: self.ordinal, handle_types };
            // Sparse: memory that is never touched costs the host nothing.
            let written = file
                .set_len(size_bytes + TRAILER_BYTES as u64)
                .and_then(|()| file.write_all_at(&trailer.encode(), size_bytes));
            if let Err(error) = written {
                std::fs::remove_file(self.path(id))?;
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
            match options.read(true).write(true).create_new(true).mode(0o600).open(self.path(id)) {
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
        self.under_lock(|_| {
            let file = match self.open_file(id) {
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
        .filter(|(trailer, _)| trailer.id == id && trailer.device == self.ordinal)
        .ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)
    }

    /// Whether the open file is the device's segment of this ID.
    pub(super) fn is_segment(&self, id: u64, file: &File) -> bool {
        let same = |a: &std::fs::Metadata, b: &std::fs::Metadata| a.dev() == b.dev() && a.ino() == b.ino();
        matches!((file.metadata(), self.path(id).symlink_metadata()), (Ok(a), Ok(b)) if same(&a, &b))
    }

    /// Frees a segment's memory if it has no holder left; called after the caller released its own hold.
    pub(super) fn release(&self, id: u64) {
        let result = self.under_lock(|counters| {
            let freed_bytes = self.bury(id)?;
            counters.used_bytes = counters.used_bytes.saturating_sub(freed_bytes);
            Ok(())
        });
        if let Err(error) = result {
            // The file stays until the next reconciliation.
            failed(error);
        }
    }

    fn path(&self, id: u64) -> PathBuf {
        self.directory.join(format!("{SEGMENT_PREFIX}{id:016x}"))
    }

    fn open_file(&self, id: u64) -> io::Result<File> {
        OpenOptions::new().read(true).write(true).open(self.path(id))
    }

    /// Unlinks a segment if it is dead, and says how many bytes that frees.
    fn bury(&self, id: u64) -> io::Result<u64> {
        let file = match self.open_file(id) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
            file => file?,
        };
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(0),
            Err(error) => Err(error.into()),
            Ok(()) => {
                let size_bytes = segment_bytes(&file)?;
                std::fs::remove_file(self.path(id))?;
                Ok(size_bytes)
            }
        }
    }

    /// Buries what processes left that ended without freeing, and counts anew.
    fn reconcile(&self, counters: &mut Counters) -> io::Result<()> {
        let mut used_bytes = 0;
        for entry in std::fs::read_dir(&self.directory)? {
            let name = entry?.file_name();
            let id = name.to_str().and_then(|name| name.strip_prefix(SEGMENT_PREFIX));
            let Some(id) = id.and_then(|id| u64::from_str_radix(id, 16).ok()) else { continue };
            if self.bury(id)? == 0 {
                used_bytes += self
                    .path(id)
                    .symlink_metadata()
                    .map_or(0, |metadata| metadata.len().saturating_sub(TRAILER_BYTES as u64));
            }
        }
        counters.used_bytes = used_bytes;
        Ok(())
    }

    /// The ledger is opened anew each time: a descriptor that stayed open would be inherited by forked
    /// children, who would keep the lock if this process were killed while it holds it; and a checkpoint
    /// finds nothing open.
    fn under_lock<T>(&self, body: impl FnOnce(&mut Counters) -> io::Result<T>) -> io::Result<T> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let path = self.directory.join(LEDGER);
        let file = match options.open(&path) {
            // After a restore on another machine the directory may be missing.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                own_directory(&self.directory)?;
                options.open(&path)?
            }
            file => file?,
        };
        retry_on_intr(|| flock(&file, FlockOperation::LockExclusive))?;
        let result = Counters::read(&file).and_then(|mut counters| {
            let result = body(&mut counters);
            counters.write(&file)?;
            result
        });
        // Not left to the closing: a child that was forked meanwhile has the same lock.
        flock(&file, FlockOperation::Unlock)?;
        result
    }
}

fn segment_bytes(file: &File) -> io::Result<u64> {
    Ok(file.metadata()?.len().saturating_sub(TRAILER_BYTES as u64))
}
