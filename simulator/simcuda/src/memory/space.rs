//! The address space that programs see: reserved ranges without access, and the page table that says
//! what lies behind them.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use cuda_abi::sys::CUresult;

use super::layout::DeviceRights;
use super::multicast::Multicast;
use super::segment::Segment;
use crate::error::Result;

/// Device memory is mapped in pages of this size (CU_MEM_ALLOC_GRANULARITY_MINIMUM of real parts).
pub(super) const PAGE_BYTES: u64 = 2 << 20;

/// A range of reserved addresses, given back when dropped. Host code that touches it crashes, as it does with
/// a device address on a GPU.
pub(super) struct Reserved {
    pub(super) start: u64,
    pub(super) len: u64,
}

impl Reserved {
    /// Reserves `len` bytes at a multiple of `align`, a power of two; at `hint` if it is not 0, suits the
    /// alignment and is free.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` if the address space has no such range.
    pub(super) fn new(len: u64, align: u64, hint: u64) -> Result<Self> {
        if hint != 0
            && hint.is_multiple_of(align)
            && map_inaccessible(hint, len, libc::MAP_FIXED_NOREPLACE) == Some(hint)
        {
            return Ok(Self { start: hint, len });
        }
        let start = map_inaccessible(0, len, 0).ok_or(CUresult::CUDA_ERROR_OUT_OF_MEMORY)?;
        if start.is_multiple_of(align) {
            return Ok(Self { start, len });
        }
        unmap(start, len);
        // With this much more, an aligned range is in there somewhere.
        let slack = align.checked_add(len).ok_or(CUresult::CUDA_ERROR_OUT_OF_MEMORY)?;
        let around = map_inaccessible(0, slack, 0).ok_or(CUresult::CUDA_ERROR_OUT_OF_MEMORY)?;
        let start = around.next_multiple_of(align);
        unmap(around, start - around);
        unmap(start + len, around + slack - (start + len));
        Ok(Self { start, len })
    }

    /// Unmaps the range.
    pub(super) fn open_hole(&self) {
        unmap(self.start, self.len);
    }

    /// Leaves a placeholder in the range: it is not free, and shows nothing.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` if the kernel refuses.
    pub(super) fn hold_place(&self) -> Result {
        hide_from_host(self.start, self.len)
    }

    /// Maps the range again, over any mapping that is there by now: the real driver does not check either.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` if the kernel refuses.
    pub(super) fn close_hole(&self) -> Result {
        match map_inaccessible(self.start, self.len, libc::MAP_FIXED) {
            Some(_) => Ok(()),
            None => Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY),
        }
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        unmap(self.start, self.len);
    }
}

/// Takes the host's access to a part of a reserved range away.
///
/// # Errors
/// `CUDA_ERROR_OUT_OF_MEMORY` if the kernel refuses.
pub(super) fn hide_from_host(start: u64, len: u64) -> Result {
    match map_inaccessible(start, len, libc::MAP_FIXED) {
        Some(_) => Ok(()),
        None => Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY),
    }
}

/// Lets the host access a part of a reserved range, which shows the segment from its start.
///
/// # Errors
/// `CUDA_ERROR_OUT_OF_MEMORY` if the kernel refuses.
pub(super) fn show_to_host(start: u64, len: u64, segment: &Segment, right: Right) -> Result {
    let protection = match right {
        Right::None => return hide_from_host(start, len),
        Right::Read => libc::PROT_READ,
        Right::ReadWrite => libc::PROT_READ | libc::PROT_WRITE,
    };
    let file = segment.export()?;
    let bytes = usize::try_from(len).map_err(|_| CUresult::CUDA_ERROR_OUT_OF_MEMORY)?;
    let flags = libc::MAP_SHARED | libc::MAP_FIXED;
    let address = start as *mut libc::c_void;
    // SAFETY: callers pass a range that the program has reserved here, and nothing else lies in.
    let mapped = unsafe { libc::mmap(address, bytes, protection, flags, file.as_raw_fd(), 0) };
    // SAFETY: the range was mapped just now.
    let is_kept = mapped == address && unsafe { libc::madvise(address, bytes, libc::MADV_DONTFORK) } == 0;
    if is_kept { Ok(()) } else { Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY) }
}

fn map_inaccessible(address: u64, len: u64, placement: libc::c_int) -> Option<u64> {
    let len = usize::try_from(len).ok()?;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | placement;
    // SAFETY: a placement other than MAP_FIXED replaces nothing. MAP_FIXED is used on a range that this
    // library had reserved before; that it may replace what came to lie there is the simulated hazard.
    let start = unsafe { libc::mmap(address as *mut libc::c_void, len, libc::PROT_NONE, flags, -1, 0) };
    if start == libc::MAP_FAILED {
        return None;
    }
    let start = start as u64;
    if address != 0 && start != address {
        // A kernel that does not know MAP_FIXED_NOREPLACE takes the address as a hint.
        unmap(start, len as u64);
        return None;
    }
    Some(start)
}

fn unmap(start: u64, len: u64) {
    if len > 0 {
        // SAFETY: callers pass a range of their own that has been reserved and that nothing points into: the
        // memory behind it is mapped elsewhere.
        unsafe { libc::munmap(start as *mut libc::c_void, len as usize) };
    }
}

/// Pinned or managed memory of the host, unmapped when dropped if it is the library's own.
pub(super) struct HostRange {
    pub(super) start: u64,
    len: u64,
    owned: bool,
}

impl HostRange {
    /// Zeroed pages at an address that host and device share: a shared mapping, `/dev/zero (deleted)` in
    /// `/proc/PID/maps`, as the driver's (criu issue 2515).
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` if the host has too little.
    pub(super) fn allocate(size_bytes: u64) -> Result<Arc<Self>> {
        let len = size_bytes.checked_next_multiple_of(4096).ok_or(CUresult::CUDA_ERROR_OUT_OF_MEMORY)?;
        let pages = usize::try_from(len).map_err(|_| CUresult::CUDA_ERROR_OUT_OF_MEMORY)?;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
        // SAFETY: a fresh mapping at an address of the kernel's choice touches no memory in use.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), pages, protection, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        }
        Ok(Arc::new(Self { start: start as u64, len, owned: true }))
    }

    /// Memory that the program has mapped itself.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if some of it is not mapped.
    pub(super) fn of_program(start: u64, size_bytes: u64) -> Result<Arc<Self>> {
        is_mapped(start, size_bytes).map_err(|_| CUresult::CUDA_ERROR_INVALID_VALUE)?;
        Ok(Arc::new(Self { start, len: size_bytes, owned: false }))
    }
}

impl Drop for HostRange {
    fn drop(&mut self) {
        if self.owned {
            unmap(self.start, self.len);
        }
    }
}

/// Asks the kernel about every page of the range.
fn is_mapped(start: u64, len: u64) -> io::Result<()> {
    const STEP: u64 = 1 << 28;
    let end = start.checked_add(len).ok_or(io::ErrorKind::InvalidInput)?;
    let mut residency = vec![0_u8; (STEP / 4096) as usize];
    let mut at = start & !4095;
    while at < end {
        let step = (end - at).min(STEP);
        // SAFETY: mincore reads nothing of the range; the vector has a byte for each page of a step.
        let result = unsafe { libc::mincore(at as *mut libc::c_void, step as usize, residency.as_mut_ptr()) };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
        at += step;
    }
    Ok(())
}

/// An entry of the page table.
#[derive(Clone)]
pub(super) struct Mapping {
    pub(super) len: u64,
    pub(super) target: Target,
    pub(super) access: Access,
}

/// What lies behind an address.
#[derive(Clone)]
pub(super) enum Target {
    /// Memory of a device, or of the host from cuMemCreate.
    Device {
        segment: Arc<Segment>,
        offset: u64,
    },
    Host(Arc<HostRange>),
    Multicast(Arc<Multicast>),
}

impl Target {
    /// The value of the handles that stand for the memory, whether there is one or not.
    pub(super) fn handle(&self) -> Option<u64> {
        match self {
            Self::Device { segment, .. } => Some(segment.handle),
            Self::Multicast(object) => Some(object.handle),
            Self::Host(_) => None,
        }
    }

    pub(super) fn segment(&self) -> Option<&Arc<Segment>> {
        match self {
            Self::Device { segment, .. } => Some(segment),
            Self::Host(_) | Self::Multicast(_) => None,
        }
    }
}

/// Which devices may access a mapping.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Access {
    /// The device that the memory is on, and its peers (cuCtxEnablePeerAccess).
    OwnerAndPeers,
    /// Every device: host memory.
    All,
    /// The given devices, as cuMemSetAccess or cuMemPoolSetAccess left them.
    Devices(DeviceRights),
}

/// What one device may do.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub(super) enum Right {
    #[default]
    None,
    Read,
    ReadWrite,
}

impl Access {
    /// What device `ordinal` may do; `is_owner_or_peer`: whether it is the memory's device or a peer of it.
    pub(super) fn of(self, ordinal: i32, is_owner_or_peer: impl FnOnce() -> bool) -> Right {
        match self {
            Self::All => Right::ReadWrite,
            Self::OwnerAndPeers if is_owner_or_peer() => Right::ReadWrite,
            Self::OwnerAndPeers => Right::None,
            Self::Devices(rights) => rights.right(ordinal),
        }
    }
}
