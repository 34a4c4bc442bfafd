//! The mirror's memory: a file of the launcher that holds the content of device memory, mapped and pinned.

use std::ffi::c_void;
use std::fs::File;
use std::os::fd::OwnedFd;

use cuda_abi::sys;
use cuda_abi::types::{CUcontext, CUresult};
use memmap2::{Advice, MmapOptions, MmapRaw};

use super::allocation::in_context;
use super::error::CaptureError;
use crate::cuda::driver::{self, DriverError, check};
use crate::fork;

const NOT_PINNED: CUresult = sys::CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED as CUresult;

/// The mirror's memory.
pub(super) struct Memory {
    map: MmapRaw,
    /// The context in which it was pinned, if it was.
    pinned_in: Option<CUcontext>,
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
        Ok(Self { map, pinned_in: None })
    }

    /// Pins it for the devices of all contexts.
    ///
    /// # Errors
    /// Why no context can: copies are slower then.
    pub fn pin(&mut self, contexts: &[CUcontext]) -> Result<(), CaptureError> {
        let mut last = CaptureError::NoContext;
        for context in contexts {
            let pinned = in_context(*context, || {
                let flags = sys::CU_MEMHOSTREGISTER_PORTABLE;
                // SAFETY: the memory is mapped, and stays so until it is unpinned.
                let result = unsafe { driver::cuMemHostRegister_v2(self.start(), self.map.len(), flags) };
                Ok(check("cuMemHostRegister", result)?)
            });
            match pinned {
                Ok(()) => {
                    self.pinned_in = Some(*context);
                    return Ok(());
                }
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// Unpins it, if it is pinned.
    ///
    /// # Errors
    /// A driver call failed.
    pub fn unpin(&mut self) -> Result<(), DriverError> {
        let Some(context) = self.pinned_in else { return Ok(()) };
        in_context(context, || {
            // SAFETY: it was pinned, and no copy is under way.
            let result = unsafe { driver::cuMemHostUnregister(self.start()) };
            // The context has been reset.
            if result == NOT_PINNED { Ok(()) } else { check("cuMemHostUnregister", result) }
        })?;
        self.pinned_in = None;
        Ok(())
    }

    pub fn is_pinned(&self) -> bool {
        self.pinned_in.is_some()
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

impl Drop for Memory {
    fn drop(&mut self) {
        // Pages of a removed mapping would stay pinned.
        let _ = driver::retry(|| self.unpin());
    }
}
