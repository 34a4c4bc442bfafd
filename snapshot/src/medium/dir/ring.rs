//! Asynchronous writes with io_uring. This module needs unsafe code: the kernel reads from memory outside Rust's
//! control, so [`Ring`] owns each block from before its write is submitted until after its completion was reaped.

use super::queue::{Done, Write};
use io_uring::{IoUring, opcode, types};
use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd;
use std::sync::{Arc, OnceLock};

/// The maximum length of one write (bytes); the rest is handled like that of a short write.
const WRITE_MAX_BYTES: usize = 1 << 30;

/// Writes to one file.
pub(super) struct Ring {
    // While `slots` holds a write, the kernel may read from it: neither field is dropped before that has ended.
    ring: ManuallyDrop<IoUring>,
    slots: ManuallyDrop<Vec<Option<Write>>>,
    file: Arc<File>,
}

impl Ring {
    /// A ring for up to `writes` concurrent writes; `None` if the kernel or the container does not permit it.
    pub(super) fn new(file: &Arc<File>, writes: usize) -> Option<Self> {
        static REFUSED: OnceLock<()> = OnceLock::new();
        if REFUSED.get().is_some() {
            return None;
        }
        let entries = u32::try_from(writes.max(1).next_power_of_two()).ok()?;
        match IoUring::new(entries) {
            Ok(ring) => {
                let slots = ManuallyDrop::new((0..writes.max(1)).map(|_| None).collect());
                Some(Self { ring: ManuallyDrop::new(ring), slots, file: Arc::clone(file) })
            }
            Err(error) => {
                tracing::debug!("io_uring is not available ({error}): writing with a thread");
                // A lack of memory or descriptors may be temporary; a missing or forbidden feature is not.
                if matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EPERM | libc::EACCES)) {
                    let _ = REFUSED.set(());
                }
                None
            }
        }
    }

    /// Submits a write. Returns it if the ring is full.
    pub(super) fn submit(&mut self, write: Write) -> Result<(), Write> {
        let Some(number) = self.slots.iter().position(Option::is_none) else { return Err(write) };
        let part = &write.block[..write.bytes.min(WRITE_MAX_BYTES)];
        let length = u32::try_from(part.len()).expect("it is at most 1 GiB");
        let entry = opcode::Write::new(types::Fd(self.file.as_raw_fd()), part.as_ptr(), length)
            .offset(write.offset)
            .build()
            .user_data(number as u64);
        // The ring owns the block from here on, whatever the results of the push and the submission.
        self.slots[number] = Some(write);
        // SAFETY: the entry's memory is a part of the block in the slot. It does not move with the `Block`, and nobody
        // frees it or writes to it until its completion is taken out (`wait`), or for ever if that cannot be waited
        // for (`drop`). The descriptor is open for as long as `self.file` is, which outlives every submission.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        if pushed.is_err() {
            return Err(self.slots[number].take().expect("it was put there above"));
        }
        // If this fails, the entry stays queued. The next `wait` submits it again and reports the error.
        let _ = self.ring.submit();
        Ok(())
    }

    /// Waits for the completion of a write; one must be in flight.
    pub(super) fn wait(&mut self) -> io::Result<Done> {
        loop {
            if let Some(completed) = self.ring.completion().next() {
                let slot = usize::try_from(completed.user_data()).ok();
                let slot = slot.and_then(|number| self.slots.get_mut(number));
                let write =
                    slot.and_then(Option::take).ok_or_else(|| io::Error::other("an unknown write"))?;
                let result = completed.result();
                let written = usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result));
                return Ok(Done { write, written });
            }
            if let Err(error) = self.ring.submit_and_wait(1)
                && error.kind() != io::ErrorKind::Interrupted
            {
                return Err(error);
            }
        }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        while self.slots.iter().any(Option::is_some) {
            match self.wait() {
                Ok(_) => {}
                Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY)) => {
                    std::thread::yield_now();
                }
                Err(error) => {
                    // The kernel may still read from the blocks: they are leaked, never freed.
                    tracing::error!("cannot wait for writes in flight, leaking their memory: {error}");
                    return;
                }
            }
        }
        // SAFETY: nothing is in flight, and neither field is used after this.
        unsafe { ManuallyDrop::drop(&mut self.ring) };
        // SAFETY: as above.
        unsafe { ManuallyDrop::drop(&mut self.slots) };
    }
}
