//! The mirror's memory: a file of the launcher that holds the content of device memory, mapped and pinned.
//!
//! Chunks of zeroes have no memory: the file has holes there, which read as zeroes. A hole is never made under a pinned
//! page, since a device would go on using the page that the file has lost.

use std::ffi::c_void;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::num::NonZeroUsize;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};

use cuda_abi::types::CUcontext;
use memmap2::{Advice, MmapOptions, MmapRaw, UncheckedAdvice};

use super::bounce::BounceBuffers;
use super::error::CaptureError;
use super::pinning;
use super::ranges::{joined, total_bytes, without};
use crate::cuda::driver::{self, DriverError};
use crate::fork;

/// The mirror's memory.
pub(super) struct Memory {
    map: MmapRaw,
    /// What has memory. The rest is holes.
    allocated: Vec<Range<u64>>,
    /// In order.
    pinned: Vec<Pinned>,
    /// For what is not pinned.
    buffers: Option<BounceBuffers>,
    /// The kernel can allocate memory before it is written. Otherwise a thread that writes to the mirror gets SIGBUS if there is
    /// no memory.
    populates: bool,
    /// How much more may be allocated, in bytes.
    room_bytes: u64,
}

/// A range that was pinned by one call.
struct Pinned {
    place: Range<u64>,
    /// The context in which it was pinned.
    context: CUcontext,
}

impl Memory {
    /// Maps a file; children of a fork do not get it.
    ///
    /// # Errors
    /// What the system says, and a file that is shorter than `bytes`: what lies behind its end could not be touched.
    pub fn map(file: OwnedFd, bytes: u64) -> Result<Self, CaptureError> {
        let file = File::from(file);
        let found_bytes = file.metadata().map_err(CaptureError::ReadMirrorSize)?.len();
        if found_bytes < bytes {
            return Err(CaptureError::MirrorTooShort { found_bytes, bytes });
        }
        let bytes = usize::try_from(bytes).map_err(|_| CaptureError::MirrorTooLarge(bytes))?;
        let mapped = fork::while_none(|| {
            let map = MmapOptions::new().len(bytes).map_raw(&file)?;
            map.advise(Advice::DontFork)?;
            Ok(map)
        });
        let map = mapped.map_err(CaptureError::MapMirror)?;
        let (allocated, pinned) = (Vec::new(), Vec::new());
        // Nothing is populated; a kernel that does not know the advice refuses it all the same.
        // SAFETY: the range is empty.
        let populates = unsafe { libc::madvise(map.as_mut_ptr().cast(), 0, libc::MADV_POPULATE_WRITE) } == 0;
        Ok(Self { map, allocated, pinned, buffers: None, populates, room_bytes: 0 })
    }

    /// The same for a partial mirror, which the launcher has freed where the store has the content: the rest stays.
    ///
    /// # Errors
    /// As for [`Self::map`].
    pub fn map_partial(file: OwnedFd, bytes: u64) -> Result<Self, CaptureError> {
        let allocated = data(&file, bytes).map_err(CaptureError::FindHoles)?;
        let mut memory = Self::map(file, bytes)?;
        memory.allocated = allocated;
        Ok(memory)
    }

    /// Makes holes of everything but `used`, which is sorted, and begins and ends at pages. Nothing else may be pinned.
    ///
    /// # Errors
    /// What the system says.
    pub fn free_all_but(&self, used: &[Range<u64>]) -> Result<(), CaptureError> {
        for hole in without(&[0..self.bytes()], used) {
            let (start, bytes) = (hole.start as usize, (hole.end - hole.start) as usize);
            // SAFETY: the mapping is shared, nothing refers to its content, and what is removed holds none.
            let removed = unsafe { self.map.unchecked_advise_range(UncheckedAdvice::Remove, start, bytes) };
            removed.map_err(CaptureError::FreeMirror)?;
        }
        Ok(())
    }

    /// Lets threads access the memory, or not. A device that has it pinned can in either case.
    ///
    /// # Errors
    /// What the system says.
    pub fn set_accessible(&self, is_accessible: bool) -> Result<(), CaptureError> {
        let protection = if is_accessible { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_NONE };
        // SAFETY: the range is one whole mapping, to which nothing refers.
        match unsafe { libc::mprotect(self.map.as_mut_ptr().cast(), self.map.len(), protection) } {
            0 => Ok(()),
            _ => Err(CaptureError::MapMirror(io::Error::last_os_error())),
        }
    }

    /// Allocates memory for sorted ranges, and lets [`Self::grow`] allocate `room_bytes` more.
    ///
    /// # Errors
    /// There is no memory.
    pub fn allocate(&mut self, ranges: &[Range<u64>], room_bytes: u64) -> Result<(), CaptureError> {
        self.room_bytes = room_bytes;
        self.add(&without(ranges, &self.allocated))
    }

    /// Allocates memory for the holes in a range, as far as there is room.
    ///
    /// # Errors
    /// There is no room, or no memory.
    pub fn grow(&mut self, range: Range<u64>) -> Result<(), CaptureError> {
        let holes = without(&[range], &self.allocated);
        let left_bytes = self.room_bytes.checked_sub(total_bytes(&holes));
        self.room_bytes = left_bytes.ok_or(CaptureError::NoRoom)?;
        self.add(&holes)
    }

    fn add(&mut self, holes: &[Range<u64>]) -> Result<(), CaptureError> {
        for hole in holes {
            let bytes = hole.end - hole.start;
            match self.map.advise_range(Advice::PopulateWrite, hole.start as usize, bytes as usize) {
                Ok(()) => {}
                // Before Linux 5.14: allocated when it is pinned or written.
                Err(error) if error.kind() == ErrorKind::InvalidInput => {}
                Err(source) => return Err(CaptureError::AllocateMirror { bytes, source }),
            }
            self.allocated.push(hole.clone());
        }
        self.allocated = joined(std::mem::take(&mut self.allocated));
        Ok(())
    }

    /// The parts of a range that have memory.
    pub fn allocated_in(&self, range: Range<u64>) -> Vec<Range<u64>> {
        let range = [range];
        without(&range, &without(&range, &self.allocated))
    }

    /// Whether it has memory in sorted ranges only.
    pub fn is_within(&self, ranges: &[Range<u64>]) -> bool {
        without(&self.allocated, ranges).is_empty()
    }

    /// Whether all of a range has memory.
    pub fn is_allocated(&self, range: Range<u64>) -> bool {
        without(&[range], &self.allocated).is_empty()
    }

    /// Pins sorted ranges for the devices of all contexts.
    ///
    /// # Errors
    /// Why no context can: copies are slower then.
    pub fn pin(&mut self, ranges: &[Range<u64>], contexts: &[CUcontext]) -> Result<(), CaptureError> {
        let pinned: Vec<_> = self.pinned.iter().map(|pinned| pinned.place.clone()).collect();
        let result = without(ranges, &pinned).into_iter().try_for_each(|place| {
            let bytes = (place.end - place.start) as usize;
            let context = pinning::pin(self.at(place.start), bytes, contexts)?;
            self.pinned.push(Pinned { place, context });
            Ok(())
        });
        self.pinned.sort_unstable_by_key(|pinned| pinned.place.start);
        result
    }

    /// Has what is not pinned copied by threads, through buffers that are.
    ///
    /// # Errors
    /// Memory of the mirror cannot be allocated before it is written, or the buffers cannot be pinned.
    pub fn add_buffers(&mut self, threads: NonZeroUsize, contexts: &[CUcontext]) -> Result<(), CaptureError> {
        if !self.populates {
            return Err(CaptureError::NotPopulated);
        }
        match &mut self.buffers {
            Some(buffers) => buffers.set_threads(threads),
            None => self.buffers = Some(BounceBuffers::new(threads, contexts)?),
        }
        Ok(())
    }

    pub fn buffers(&mut self) -> Option<&mut BounceBuffers> {
        self.buffers.as_mut()
    }

    /// Unpins all of it that is pinned, and the buffers.
    ///
    /// # Errors
    /// A driver call failed.
    pub fn unpin(&mut self) -> Result<(), DriverError> {
        if let Some(buffers) = &mut self.buffers {
            buffers.unpin()?;
            self.buffers = None;
        }
        while let Some(Pinned { place, context }) = self.pinned.last() {
            pinning::unpin(self.at(place.start), *context)?;
            self.pinned.pop();
        }
        Ok(())
    }

    /// Whether it, or a part of it, is pinned.
    pub fn is_pinned(&self) -> bool {
        !self.pinned.is_empty()
    }

    /// Whether there are buffers.
    pub fn has_buffers(&self) -> bool {
        self.buffers.is_some()
    }

    /// The end of the longest copy from an offset on, and whether it goes through the buffers. The driver is given memory
    /// that was pinned by one call, or memory that is not pinned.
    pub fn next_copy(&self, offset: u64) -> (u64, bool) {
        let next = self.pinned.partition_point(|pinned| pinned.place.end <= offset);
        match self.pinned.get(next) {
            Some(Pinned { place, .. }) if place.start <= offset => (place.end, false),
            Some(Pinned { place, .. }) => (place.start, self.has_buffers()),
            None => (self.bytes(), self.has_buffers()),
        }
    }

    fn start(&self) -> *mut c_void {
        self.map.as_mut_ptr().cast()
    }

    pub fn bytes(&self) -> u64 {
        self.map.len() as u64
    }

    /// The address of an offset that is not behind the end.
    pub fn at(&self, offset: u64) -> *mut c_void {
        self.start().wrapping_byte_add(offset as usize)
    }
}

/// The ranges of a file that are not holes, in order.
fn data(file: &OwnedFd, bytes: u64) -> io::Result<Vec<Range<u64>>> {
    // SAFETY: the call changes nothing but the position of the file, which nobody uses.
    let seek = |offset: u64, whence| match unsafe { libc::lseek(file.as_raw_fd(), offset as i64, whence) } {
        -1 => Err(io::Error::last_os_error()),
        found => Ok(found as u64),
    };
    let (mut data, mut offset) = (Vec::new(), 0);
    while offset < bytes {
        let start = match seek(offset, libc::SEEK_DATA) {
            // There is nothing behind.
            Err(error) if error.raw_os_error() == Some(libc::ENXIO) => break,
            start => start?,
        };
        offset = seek(start, libc::SEEK_HOLE)?.min(bytes);
        if start < offset {
            data.push(start..offset);
        }
    }
    Ok(data)
}

impl Drop for Memory {
    fn drop(&mut self) {
        // Pages of a removed mapping would stay pinned.
        let _ = driver::retry(|| self.unpin());
    }
}
