//! The launcher's mirror in this process, with the contexts in which it is pinned.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::ops::Range;
use std::os::fd::OwnedFd;

use cuda_abi::types::CUcontext;

use crate::cuda::capture::{CaptureError, Mirror, Room};
use crate::cuda::context::{self, OnDevice};
use crate::cuda::driver::DriverError;
use crate::cuda::memory::physical::registry;

/// A mirror that the launcher has delivered.
pub struct Delivered {
    /// Which one it is.
    pub id: u64,
    /// Its size.
    pub bytes: u64,
    /// How much may be allocated of it beyond what it was asked for, in bytes; `None` if the launcher has allocated all of
    /// it.
    pub more_bytes: Option<u64>,
    /// Whether the launcher has freed parts of it, which it can fill again.
    pub is_partial: bool,
    /// Whether the launcher leaves its file as it is until it is staged again.
    pub may_stay: bool,
    /// How many threads copy through pinned buffers; 0: the mirror is pinned.
    pub copy_threads: u64,
    /// The size of the file, if it is a window rather than a mirror.
    pub window_bytes: Option<u64>,
    /// Its file.
    pub file: OwnedFd,
}

/// A mirror, and the contexts that it needs for as long as it is pinned.
pub(super) struct PinnedMirror {
    pub mirror: Mirror,
    /// The size of the mirror that there would be, if this is a window.
    window_of: Option<u64>,
    contexts: Vec<OnDevice>,
    /// [`context::removals`] before it was pinned.
    removals: u64,
}

impl PinnedMirror {
    /// As [`Mirror::stage`].
    pub fn stage(delivered: Delivered, room: &Room) -> Result<Self, CaptureError> {
        let (removals, contexts, handles) = Self::contexts();
        let mirror = Mirror::stage(delivered.file, delivered.bytes, &handles, room)?;
        Ok(Self { mirror, window_of: None, contexts, removals })
    }

    /// Maps and pins a window of this size.
    ///
    /// # Errors
    /// As [`Mirror::stage`].
    pub fn window(delivered: Delivered, window_bytes: u64) -> Result<Self, CaptureError> {
        let (removals, contexts, handles) = Self::contexts();
        let room = Room { used: vec![0..window_bytes], ..Room::default() };
        let mirror = Mirror::stage(delivered.file, window_bytes, &handles, &room)?;
        Ok(Self { mirror, window_of: Some(delivered.bytes), contexts, removals })
    }

    /// Whether this is a window.
    pub fn is_window(&self) -> bool {
        self.window_of.is_some()
    }

    /// The size of the mirror, also of one that there is not, in bytes.
    pub fn bytes(&self) -> u64 {
        self.window_of.unwrap_or_else(|| self.mirror.bytes())
    }

    /// As [`Mirror::map`].
    pub fn map(delivered: Delivered, used: &[Range<u64>]) -> Result<Self, CaptureError> {
        let (removals, contexts, handles) = Self::contexts();
        let mirror = Mirror::map(delivered.file, delivered.bytes, &handles, used, delivered.copy_threads)?;
        Ok(Self { mirror, window_of: None, contexts, removals })
    }

    /// Maps and pins a window of this size, through which the content of the mirror is loaded.
    ///
    /// # Errors
    /// As [`Mirror::map`].
    pub fn map_window(delivered: Delivered, window_bytes: u64) -> Result<Self, CaptureError> {
        let (removals, contexts, handles) = Self::contexts();
        let mirror = Mirror::map(delivered.file, window_bytes, &handles, &[0..window_bytes], 0)?;
        Ok(Self { mirror, window_of: Some(delivered.bytes), contexts, removals })
    }

    /// Whether it may stay pinned while the program runs, after it was copied back. It must not keep alive a context that
    /// the program does not have.
    pub fn may_stay(&self) -> bool {
        let is_whole = self.mirror.is_pinned() && self.mirror.shortcomings.is_empty();
        is_whole && !self.is_window() && self.contexts.iter().all(OnDevice::is_of_program)
    }

    /// Whether the next capture can use this kept mirror as `delivered`: what was pinned of it, or its buffers, still is, and
    /// it pins no memory that is not needed any more.
    pub fn serves(&self, delivered: &Delivered, room: &Room) -> bool {
        let is_same = !self.is_window() && self.mirror.bytes() == delivered.bytes;
        is_same && self.removals == context::removals() && self.mirror.is_needed(room)
    }

    /// Prepares a mirror that was kept for the next capture.
    pub fn get_ready(&mut self, room: &Room) -> Result<(), CaptureError> {
        let (_, contexts, handles) = Self::contexts();
        self.mirror.get_ready(&handles, room)?;
        self.contexts.extend(contexts);
        Ok(())
    }

    /// A context on each device with memory, and [`context::removals`] before that.
    fn contexts() -> (u64, Vec<OnDevice>, Vec<CUcontext>) {
        let removals = context::removals();
        let devices: Vec<c_int> = registry()
            .allocations
            .values()
            .filter(|allocation| allocation.team.is_none())
            .map(|allocation| allocation.device)
            .collect();
        let contexts: Vec<_> = contexts_of_devices(devices).into_values().collect();
        let handles = contexts.iter().map(|on_device: &OnDevice| on_device.context).collect();
        (removals, contexts, handles)
    }

    pub fn unpin(&mut self) -> Result<(), DriverError> {
        let unpinned = self.mirror.unpin();
        self.contexts.clear();
        unpinned
    }
}

/// A context to work in on each device that gives one.
pub(super) fn contexts_of_devices(devices: impl IntoIterator<Item = c_int>) -> BTreeMap<c_int, OnDevice> {
    let mut contexts = BTreeMap::new();
    for device in devices {
        if !contexts.contains_key(&device)
            && let Some(context) = context::on_device(device)
        {
            contexts.insert(device, context);
        }
    }
    contexts
}
