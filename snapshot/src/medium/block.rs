//! Aligned memory for direct I/O.

use rustix::mm::Advice;
use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// Direct I/O needs offsets, lengths and addresses that are multiples of this (bytes).
pub const BLOCK_ALIGN: usize = 4096;

/// Blocks of at least this length use huge pages of this size (bytes): fewer page faults at the first fill, and far
/// fewer pages per I/O request.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Memory aligned to [`BLOCK_ALIGN`]. All of it is writable; the first [`Block::filled`] bytes are its content.
#[derive(Debug)]
pub struct Block {
    memory: NonNull<u8>,
    capacity: usize,
    filled: usize,
}

// SAFETY: a block owns its memory, and nothing else points to it.
unsafe impl Send for Block {}

// SAFETY: through a shared reference its memory can only be read.
unsafe impl Sync for Block {}

impl Block {
    /// An empty block of `capacity` bytes, a non-zero multiple of [`BLOCK_ALIGN`].
    ///
    /// # Panics
    /// If `capacity` is zero or not a multiple of [`BLOCK_ALIGN`].
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        assert!(capacity > 0 && capacity.is_multiple_of(BLOCK_ALIGN), "a block of {capacity} bytes");
        let layout = Self::layout(capacity);
        // SAFETY: the layout is not of size zero.
        let memory = unsafe { alloc(layout) };
        let memory = NonNull::new(memory).unwrap_or_else(|| handle_alloc_error(layout));
        if capacity >= HUGE_PAGE_BYTES {
            // SAFETY: the pages belong to this block, and the advice changes nothing of what they hold.
            let advised =
                unsafe { rustix::mm::madvise(memory.as_ptr().cast(), capacity, Advice::LinuxHugepage) };
            // Only advice: without huge pages the block works, but is slower.
            let _ = advised;
        }
        // SAFETY: so many bytes were allocated, and nobody else has them.
        unsafe { memory.write_bytes(0, capacity) };
        Self { memory, capacity, filled: 0 }
    }

    fn layout(capacity: usize) -> Layout {
        let align = if capacity >= HUGE_PAGE_BYTES { HUGE_PAGE_BYTES } else { BLOCK_ALIGN };
        Layout::from_size_align(capacity, align).expect("it fits into the address space")
    }

    /// The length of its content (bytes).
    #[must_use]
    pub fn filled(&self) -> usize {
        self.filled
    }

    /// Sets the length of its content.
    ///
    /// # Panics
    /// If `bytes` is larger than the capacity.
    pub fn set_filled(&mut self, bytes: usize) {
        assert!(bytes <= self.capacity, "{bytes} bytes in a block of {}", self.capacity);
        self.filled = bytes;
    }

    /// Its content.
    #[must_use]
    pub fn content(&self) -> &[u8] {
        &self[..self.filled]
    }
}

impl Deref for Block {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the memory is ours for as long as the block lives, all of it was written when it was made.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr(), self.capacity) }
    }
}

impl DerefMut for Block {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the block is borrowed mutably: nobody else reads or writes it.
        unsafe { std::slice::from_raw_parts_mut(self.memory.as_ptr(), self.capacity) }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: the memory was allocated with this very layout and is given back once.
        unsafe { dealloc(self.memory.as_ptr(), Self::layout(self.capacity)) }
    }
}
