//! Segments: pieces of physical device memory, and where this library maps them.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use cuda_abi::sys::CUresult;
use parking_lot::Mutex;
use rustix::fs::{FlockOperation, SeekFrom, flock, seek};

use super::layout::Location;
use super::ledger::{self, DeviceMemory};
use super::trailer::Trailer;
use crate::error::Result;
use crate::handle;

/// Private or shared pages of host memory, unmapped when dropped.
pub(super) struct Pages {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the pages are plain memory that any thread may use; their use is the program's responsibility, as
// with memory on a device.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    /// The first `len` bytes of a file, shared. A forked child does not get them, so that it does not keep
    /// device memory alive.
    pub(super) fn of_file(file: &File, len: u64) -> io::Result<Self> {
        let pages = Self::map(len, libc::MAP_SHARED, file.as_raw_fd())?;
        // SAFETY: the range was mapped just now and belongs to `pages`.
        if unsafe { libc::madvise(pages.start.as_ptr().cast(), pages.len, libc::MADV_DONTFORK) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(pages)
    }

    /// Zeroed memory of this process; pages that are never touched cost nothing.
    pub(super) fn private(len: u64) -> io::Result<Self> {
        Self::map(len, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE, -1)
    }

    fn map(len: u64, flags: libc::c_int, descriptor: libc::c_int) -> io::Result<Self> {
        let len = usize::try_from(len).map_err(io::Error::other)?;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice touches no memory in use.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, descriptor, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, len })
    }

    pub(super) fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the range is this value's own; every user keeps the value alive (Span::keep).
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// A segment's file as this process maps it. The mapping keeps the open file description and with it the
/// shared lock that says that the segment is in use, so no descriptor stays open.
pub(super) struct Backing {
    memory: &'static DeviceMemory,
    pub(super) id: u64,
    /// `None` only while it is dropped.
    pages: Option<Pages>,
    pub(super) host: *mut u8,
}

// SAFETY: `host` points into `pages`, which may be used by any thread.
unsafe impl Send for Backing {}
// SAFETY: as above.
unsafe impl Sync for Backing {}

impl Backing {
    fn create(location: Location, size_bytes: u64, handle_types: u32) -> Result<Arc<Self>> {
        let memory = ledger::memory(location)?;
        let (id, file) = memory.create(size_bytes, handle_types)?;
        Self::map(memory, id, file, size_bytes)
    }

    fn map(memory: &'static DeviceMemory, id: u64, file: File, size_bytes: u64) -> Result<Arc<Self>> {
        let pages = Pages::of_file(&file, size_bytes);
        drop(file);
        let Ok(pages) = pages else {
            memory.release(id);
            return Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        };
        let host = pages.start();
        Ok(Arc::new(Self { memory, id, pages: Some(pages), host }))
    }
}

impl Drop for Backing {
    fn drop(&mut self) {
        self.pages = None;
        self.memory.release(self.id);
    }
}

/// A piece of physical memory. It lives while a mapping, a handle or an allocation refers to it.
pub(super) struct Segment {
    pub(super) location: Location,
    pub(super) size_bytes: u64,
    /// `CU_MEM_HANDLE_TYPE_…` bits.
    pub(super) handle_types: u32,
    /// The value of the handles that stand for it (cuMemCreate); it is the same whenever one is retained.
    pub(super) handle: u64,
    /// It came from another process, as a descriptor or an IPC handle.
    pub(super) is_imported: bool,
    contents: Mutex<Contents>,
}

/// Where a segment's bytes are.
enum Contents {
    OnDevice(Arc<Backing>),
    /// The process is detached.
    Saved(Saved),
}

/// A copy of a segment's bytes in host memory.
pub(super) struct Saved {
    pages: Pages,
    /// The parts of the segment that were ever written; the rest is zero.
    written: Vec<Range<usize>>,
}

impl Segment {
    /// Takes memory of a device or of the host.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` if there is too little.
    pub(super) fn create(location: Location, size_bytes: u64, handle_types: u32) -> Result<Arc<Self>> {
        let backing = Backing::create(location, size_bytes, handle_types)?;
        Ok(Arc::new(Self::new(location, size_bytes, handle_types, false, backing)))
    }

    fn new(
        location: Location,
        size_bytes: u64,
        handle_types: u32,
        is_imported: bool,
        backing: Arc<Backing>,
    ) -> Self {
        Self {
            location,
            size_bytes,
            handle_types,
            handle: handle::fresh() as u64,
            is_imported,
            contents: Mutex::new(Contents::OnDevice(backing)),
        }
    }

    /// The segment of a descriptor that [`Segment::export`] made, in this process or another.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for any other descriptor.
    pub(super) fn import(descriptor: OwnedFd) -> Result<Arc<Self>> {
        const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;
        let file = File::from(descriptor);
        let trailer = Trailer::read(&file).ok().flatten().ok_or(INVALID)?;
        let location = ledger::location(trailer.device).map_err(|_| INVALID)?;
        let memory = ledger::memory(location).map_err(|_| INVALID)?;
        // The exporter holds the lock through this very description. Taking it again changes nothing
        // for such a descriptor, and refuses to wait for anything else.
        flock(&file, FlockOperation::NonBlockingLockShared).map_err(|_| INVALID)?;
        if !memory.is_segment(trailer.id, &file) {
            return Err(INVALID);
        }
        let backing = Backing::map(memory, trailer.id, file, trailer.size_bytes)?;
        Ok(Arc::new(Self::new(location, trailer.size_bytes, trailer.handle_types, true, backing)))
    }

    /// The segment of an ID received from another process, on the GPU of this ID.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if there is no such segment any more, or another of that ID.
    pub(super) fn open(gpu: i32, id: u64, size_bytes: u64) -> Result<Arc<Self>> {
        let device = ledger::device_of_gpu(gpu).map_err(|_| CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let memory = ledger::device(device)?;
        let (trailer, file) = memory.open_segment(id)?;
        if trailer.size_bytes != size_bytes {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let backing = Backing::map(memory, id, file, size_bytes)?;
        Ok(Arc::new(Self::new(Location::Device(device), size_bytes, trailer.handle_types, true, backing)))
    }

    /// The segment's number among those of its device.
    ///
    /// # Errors
    /// As [`Segment::backing`].
    pub(super) fn id(&self) -> Result<u64> {
        self.backing().map(|backing| backing.id)
    }

    /// The ID of its GPU, which other processes know it by.
    pub(super) fn gpu(&self) -> Result<i32> {
        Ok(ledger::memory(self.location)?.gpu())
    }

    /// A descriptor that keeps the memory alive as long as it is open anywhere.
    pub(super) fn export(&self) -> Result<OwnedFd> {
        let backing = self.backing()?;
        let (_, file) = backing.memory.open_segment(backing.id)?;
        Ok(file.into())
    }

    /// The memory as this process maps it.
    ///
    /// # Errors
    /// `CUDA_ERROR_ILLEGAL_STATE` while the process is detached.
    pub(super) fn backing(&self) -> Result<Arc<Backing>> {
        match &*self.contents.lock() {
            Contents::OnDevice(backing) => Ok(Arc::clone(backing)),
            Contents::Saved(_) => Err(CUresult::CUDA_ERROR_ILLEGAL_STATE),
        }
    }

    /// Copies the contents to host memory.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` if the host has too little; nothing has changed then.
    pub(super) fn save(&self) -> Result<Saved> {
        let backing = self.backing()?;
        let (_, file) = backing.memory.open_segment(backing.id)?;
        let saved = Pages::private(self.size_bytes).and_then(|pages| {
            let written = written_parts(&file, self.size_bytes)?;
            Ok(Saved { pages, written })
        });
        let saved = saved.map_err(|error| {
            eprintln!("simcuda: cannot save device memory: {error}");
            CUresult::CUDA_ERROR_OUT_OF_MEMORY
        })?;
        saved.copy(backing.host, saved.pages.start());
        Ok(saved)
    }

    /// Lets the device's memory go; the contents are in `saved` from now on. Memory whose descriptor has been
    /// exported is treated no differently: it gets memory of its own when it comes back, and is no longer
    /// shared with every holder of the descriptor, as was observed of driver r615.
    pub(super) fn leave_device(&self, saved: Saved) {
        *self.contents.lock() = Contents::Saved(saved);
    }

    /// Takes memory of the device again and puts the contents back.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` if the device has too little; the contents stay saved.
    pub(super) fn return_to_device(&self) -> Result {
        let mut contents = self.contents.lock();
        let Contents::Saved(saved) = &*contents else { return Ok(()) };
        let backing = Backing::create(self.location, self.size_bytes, self.handle_types)?;
        saved.copy(saved.pages.start(), backing.host);
        *contents = Contents::OnDevice(backing);
        Ok(())
    }
}

impl Saved {
    /// Copies the written parts from one copy of the segment to another.
    fn copy(&self, from: *const u8, to: *mut u8) {
        for part in &self.written {
            // SAFETY: the part lies within the segment (`written_parts`).
            let from = unsafe { from.add(part.start) };
            // SAFETY: as above.
            let to = unsafe { to.add(part.start) };
            // SAFETY: both are mappings of the whole segment, different ones; all work is done and calls are
            // locked out, so no data is written meanwhile.
            unsafe { std::ptr::copy_nonoverlapping(from, to, part.len()) };
        }
    }
}

/// The parts of a segment's file that contain data.
fn written_parts(file: &File, size_bytes: u64) -> io::Result<Vec<Range<usize>>> {
    let mut parts = Vec::new();
    let mut at = 0;
    while at < size_bytes {
        let start = match seek(file, SeekFrom::Data(at)) {
            Err(rustix::io::Errno::NXIO) => break,
            start => start?,
        };
        if start >= size_bytes {
            break;
        }
        let end = seek(file, SeekFrom::Hole(start))?.min(size_bytes);
        parts.push(
            usize::try_from(start).map_err(io::Error::other)?
                ..usize::try_from(end).map_err(io::Error::other)?,
        );
        at = end;
    }
    Ok(parts)
}
