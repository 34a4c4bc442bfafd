//! Writes in flight through io_uring. The one place of this medium with unsafe code: the kernel reads from memory
//! that Rust knows nothing of, so [`Ring`] owns each block from before its write is handed over until after its
//! completion has been seen.

use super::queue::{Done, Write};
use io_uring::{IoUring, opcode, types};
use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd;
use std::sync::{Arc, OnceLock};

/// More is not asked for in one write; what is left is written like the rest of any short write (bytes).
const WRITE_MAX_BYTES: usize = 1 << 30;

/// Writes to one file.
pub(super) struct Ring {
    // The kernel may be at work for as long as `slots` holds anything: neither is dropped before.
    ring: ManuallyDrop<IoUring>,
    slots: ManuallyDrop<Vec<Option<Write>>>,
    file: Arc<File>,
}

impl Ring {
    /// A ring for up to `writes` writes at a time; `None` where the kernel, or the container, does not give one.
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
                tracing::debug!("no io_uring ({error}): writing with a thread");
                // Out of memory or of descriptors may pass; what is not there or not allowed stays so.
                if matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EPERM | libc::EACCES)) {
                    let _ = REFUSED.set(());
                }
                None
            }
        }
    }

    /// Begins a write. Gives it back if there is no room for it.
    pub(super) fn submit(&mut self, write: Write) -> Result<(), Write> {
        let Some(number) = self.slots.iter().position(Option::is_none) else { return Err(write) };
        let part = &write.block[..write.bytes.min(WRITE_MAX_BYTES)];
        let length = u32::try_from(part.len()).expect("it is at most 1 GiB");
        let entry = opcode::Write::new(types::Fd(self.file.as_raw_fd()), part.as_ptr(), length)
            .offset(write.offset)
            .build()
            .user_data(number as u64);
        // From now on the block is ours, wherever the push and the submission end.
        self.slots[number] = Some(write);
        // SAFETY: the entry's memory is a part of the block in the slot. It does not move with the `Block`, and nobody
        // frees it or writes to it until its completion is taken out (`wait`), or for ever if that cannot be waited
        // for (`drop`). The descriptor is open for as long as `self.file` is, which outlives every submission.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        if pushed.is_err() {
            return Err(self.slots[number].take().expect("it was put there above"));
        }
        // What cannot be submitted now stays in the queue and is submitted by the next `wait`, which tells why not.
        let _ = self.ring.submit();
        Ok(())
    }

    /// Waits for the end of a write. There has to be one in flight.
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
                    // The kernel may still read from the blocks: they are given up, never freed.
                    tracing::error!("cannot wait for writes in flight, their memory is lost: {error}");
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
