//! Gives unused device memory back to the driver before an allocation fails.
//!
//! Each allocator can need what another one holds, so they register here what they give back.

use std::ffi::c_int;
use std::sync::OnceLock;

/// Gives unused memory back to a device; whether there was any.
type Reclaim = fn(c_int) -> bool;

static RECLAIM: OnceLock<Reclaim> = OnceLock::new();

/// Registers how memory is given back; the first registration stays.
pub(super) fn register(reclaim: Reclaim) {
    let _ = RECLAIM.set(reclaim);
}

/// Gives unused memory back to a device; whether there was any.
pub(super) fn make_room(device: c_int) -> bool {
    RECLAIM.get().is_some_and(|reclaim| reclaim(device))
}
