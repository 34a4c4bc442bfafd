//! The child of a fork does not answer for its parent: it closes the simulator's own descriptors that it inherits. Their
//! mappings are not inherited in the first place (`MADV_DONTFORK`), and a program that the child executes gets neither
//! (close-on-exec).
//!
//! The dump blockers stay open and mapped in the child, as the driver's device files do.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Once;
use std::sync::atomic::{AtomicI32, Ordering};

use super::lock::GATE;

/// A descriptor that must not stay open in a child.
#[derive(Debug, Clone, Copy)]
pub(super) enum Slot {
    Page,
    Ours,
    Theirs,
}

/// Numbers of open descriptors, by slot; -1: none. Atomics, because the child of a fork may not take a lock.
static DESCRIPTORS: [AtomicI32; 3] = [const { AtomicI32::new(-1) }; 3];
static WATCH: Once = Once::new();

/// Names the descriptor of a slot; `None` when it is about to be closed.
pub(super) fn close_in_child(slot: Slot, descriptor: Option<BorrowedFd<'_>>) {
    let number = descriptor.map_or(-1, |descriptor| descriptor.as_raw_fd());
    DESCRIPTORS[slot as usize].store(number, Ordering::Release);
}

/// From now on each child of a fork closes them.
pub(super) fn watch() {
    WATCH.call_once(|| {
        // SAFETY: the handler does only what the child of a process with threads may do.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
}

extern "C" fn in_child() {
    for descriptor in &DESCRIPTORS {
        let number = descriptor.swap(-1, Ordering::AcqRel);
        if number >= 0 {
            // SAFETY: close is async-signal-safe; the number is the child's copy of a descriptor of ours, whose
            // owner is a static that nothing drops in the child.
            unsafe { libc::close(number) };
        }
    }
    GATE.forget_in_child();
}
