//! The launcher's mirror in this process, with the contexts in which it is pinned.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::os::fd::OwnedFd;

use cuda_abi::types::CUcontext;

use crate::cuda::capture::{CaptureError, Mirror};
use crate::cuda::context::{self, OnDevice};
use crate::cuda::driver::DriverError;
use crate::cuda::memory::physical::registry;

/// A mirror that the launcher has delivered.
pub struct Delivered {
    /// Which one it is.
    pub id: u64,
    /// Its size.
    pub bytes: u64,
    /// Its file.
    pub file: OwnedFd,
}

/// A mirror, and the contexts that it needs for as long as it is pinned.
pub(super) struct PinnedMirror {
    pub mirror: Mirror,
    contexts: Vec<OnDevice>,
}

impl PinnedMirror {
    /// `map` is [`Mirror::map`] or [`Mirror::stage`].
    pub fn new(
        delivered: Delivered,
        map: fn(OwnedFd, u64, &[CUcontext]) -> Result<Mirror, CaptureError>,
    ) -> Result<Self, CaptureError> {
        let (contexts, handles) = Self::contexts();
        Ok(Self { mirror: map(delivered.file, delivered.bytes, &handles)?, contexts })
    }

    /// Prepares a mirror that was kept for the next capture.
    pub fn get_ready(&mut self) {
        let (contexts, handles) = Self::contexts();
        self.mirror.get_ready(&handles);
        self.contexts.extend(contexts);
    }

    fn contexts() -> (Vec<OnDevice>, Vec<CUcontext>) {
        let devices: Vec<c_int> =
            registry().allocations.values().map(|allocation| allocation.device).collect();
        let contexts: Vec<_> = contexts_of_devices(devices).into_values().collect();
        let handles = contexts.iter().map(|on_device: &OnDevice| on_device.context).collect();
        (contexts, handles)
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
