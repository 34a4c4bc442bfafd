//! Access of one device to another's memory.
//!
//! The driver's own peer access applies to memory of cuMemAlloc and not to mapped memory. So the access that the
//! program enables is recorded and granted to each mapping of the arena.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint};

use ckpt_protocol::agent::RegionKind;
use cuda_abi::sys;
use cuda_abi::types::{CUcontext, CUdeviceptr, CUresult};

use super::physical;
use crate::cuda::activation::is_started;
use crate::cuda::handler::handlers;
use crate::cuda::result::SUCCESS;
use crate::cuda::shared::Shared;
use crate::cuda::stream_capture::relaxed;
use crate::cuda::{context, driver};
use cuda_abi::layout::Access;

/// A device, and the one whose memory it may access.
type Devices = (c_int, c_int);

/// A context, and the one whose memory it may access, to their devices.
static PEERS: Shared<BTreeMap<(usize, usize), Devices>> = Shared::new(BTreeMap::new());

/// The devices, beside itself, that may access a device's memory.
pub(crate) fn devices_with_access_to(device: c_int) -> Vec<c_int> {
    let mut devices: Vec<c_int> =
        PEERS.lock().values().filter(|(_, accessed)| *accessed == device).map(|(peer, _)| *peer).collect();
    devices.sort_unstable();
    devices.dedup();
    devices
}

/// Lets a device, and those that have access to its memory, read and write a new mapping.
///
/// # Errors
/// A driver call failed.
pub(super) fn grant(device: c_int, address: CUdeviceptr, bytes: u64) -> Result<(), CUresult> {
    let mut granted = Vec::new();
    let mut wanted = devices_with_access_to(device);
    loop {
        let mut access = vec![Access::of(device)];
        access.extend(wanted.iter().map(|peer| Access::of(*peer)));
        access
            .extend(granted.iter().filter(|peer| !wanted.contains(peer)).map(|peer| Access::none_of(*peer)));
        physical::set_access(address, bytes, &access)?;
        granted = wanted;
        // A thread that changes it meanwhile may not have seen this mapping.
        wanted = devices_with_access_to(device);
        if wanted == granted {
            return Ok(());
        }
    }
}

handlers! {
    fn cuCtxEnablePeerAccess(peer: CUcontext, flags: c_uint) |call| {
        let result = call();
        if result != SUCCESS || !is_started() {
            return result;
        }
        let Some((pair, devices)) = pair_with(peer) else { return result };
        PEERS.lock().insert(pair, devices);
        let Err(error) = set_for_all(devices.1, Access::of(devices.0)) else { return result };
        // SAFETY: it was enabled above.
        let _ = unsafe { driver::cuCtxDisablePeerAccess(peer) };
        ends(&[pair]);
        error
    }

    fn cuCtxDisablePeerAccess(peer: CUcontext) |call| {
        let result = call();
        if result == SUCCESS
            && is_started()
            && let Some((current, _)) = context::current()
        {
            ends(&[(current as usize, peer as usize)]);
        }
        result
    }
}

/// Peer access ends with either context.
pub(super) fn context_removed(context: CUcontext) {
    let context = context as usize;
    let is_part = |pair: &&(usize, usize)| pair.0 == context || pair.1 == context;
    let pairs: Vec<_> = PEERS.lock().keys().filter(is_part).copied().collect();
    ends(&pairs);
}

/// The current context with a peer of it, and their devices.
fn pair_with(peer: CUcontext) -> Option<((usize, usize), Devices)> {
    let (context, device) = context::current()?;
    let (_, accessed) = context::within(peer, context::current).ok().flatten()?;
    Some(((context as usize, peer as usize), (device, accessed)))
}

/// Removes access that no other pair of contexts grants.
fn ends(pairs: &[(usize, usize)]) {
    for pair in pairs {
        let Some((device, accessed)) = PEERS.lock().remove(pair) else { continue };
        if !devices_with_access_to(accessed).contains(&device) {
            // A failure is ignored: the device then keeps more access than it should have.
            let _ = set_for_all(accessed, Access::none_of(device));
        }
    }
}

/// Changes the access rights to the memory of a device.
fn set_for_all(device: c_int, access: Access) -> Result<(), CUresult> {
    const GONE: CUresult = sys::CUresult::CUDA_ERROR_INVALID_VALUE as CUresult;
    relaxed(|| {
        for (address, bytes) in mappings_on(device) {
            match physical::set_access(address, bytes, &[access]) {
                // Unmapped meanwhile.
                Ok(()) | Err(GONE) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    })
}

fn mappings_on(device: c_int) -> Vec<(CUdeviceptr, u64)> {
    let registry = physical::registry();
    let is_meant = |kind| matches!(kind, RegionKind::Allocation | RegionKind::Slab);
    let allocations = registry
        .allocations
        .values()
        .filter(|allocation| allocation.device == device && is_meant(allocation.kind));
    allocations
        .flat_map(|allocation| &allocation.mappings)
        .map(|mapping| (mapping.address, mapping.bytes))
        .collect()
}
