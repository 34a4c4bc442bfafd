//! A shared mapping.

use std::ffi::c_void;
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

use rustix::mm::{self, MapFlags, ProtFlags};

/// Unmapped when dropped.
pub struct Mapping {
    start: NonNull<c_void>,
    size_bytes: usize,
}

// SAFETY: the mapping is an address range of the process; no thread owns it.
unsafe impl Send for Mapping {}
// SAFETY: the mapping itself offers no access to its bytes; code that makes a
// reference of it is responsible for sharing.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the beginning of a file, for this process only: the child of a fork does not get it.
    ///
    /// # Errors
    /// The kernel's, of mmap or madvise.
    pub fn shared(descriptor: BorrowedFd<'_>, size_bytes: usize, protection: ProtFlags) -> io::Result<Self> {
        let mapping = Self::inherited(descriptor, size_bytes, protection)?;
        // SAFETY: the range is the mapping just made, and the advice changes nothing in this process.
        unsafe { mm::madvise(mapping.start.as_ptr(), size_bytes, mm::Advice::LinuxDontFork) }?;
        Ok(mapping)
    }

    /// Maps the beginning of a file; the child of a fork inherits the mapping.
    ///
    /// # Errors
    /// The kernel's, of mmap.
    pub fn inherited(
        descriptor: BorrowedFd<'_>,
        size_bytes: usize,
        protection: ProtFlags,
    ) -> io::Result<Self> {
        let anywhere = std::ptr::null_mut();
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory in use.
        let start = unsafe { mm::mmap(anywhere, size_bytes, protection, MapFlags::SHARED, descriptor, 0) }?;
        let start = NonNull::new(start).ok_or_else(|| io::Error::other("a mapping at address 0"))?;
        Ok(Self { start, size_bytes })
    }

    /// Where the mapping begins, page-aligned.
    pub fn start(&self) -> NonNull<c_void> {
        self.start
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is the mapping's own, and references to it do not outlive it.
        // Unmapping a whole mapping cannot fail.
        let _ = unsafe { mm::munmap(self.start.as_ptr(), self.size_bytes) };
    }
}
