//! Memory of the program's own calls, and multicast objects, that processes pass to each other by descriptors:
//! cuMemExportToShareableHandle and cuMemImportFromShareableHandle.
//!
//! As with [CUDA IPC](super), the launcher passes the memory on. But the owner keeps what it has released for as long as
//! there are descriptors or imports of it, see [`exchanged`](super::exchanged).

use std::ffi::c_int;
use std::os::fd::{AsFd, OwnedFd};

use ckpt_protocol::agent::{RegionKind, ShareKey as Key};
use cuda_abi::types::CUresult;

use super::capability::{Capability, Hold, Kind, Root};
use super::exchanged::TABLE;
use super::launcher::{self, NOTICES, ShareError, connect, tried};
use super::published::{self, PUBLISHED, key_of, send_notices};
use super::random_key;
use crate::cuda::memory::physical::{self, Id, PhysicalAllocation, Source, registry};
use crate::cuda::result::{INVALID_VALUE, OPERATING_SYSTEM, OUT_OF_MEMORY};
use crate::cuda::stream_capture::relaxed;
use crate::fork;

/// Exports memory of the program. `Ok(None)`: there is no launcher that could pass it on, or its origin is unknown. What
/// came from another process is not exported again, as by the driver (seen with 580.159.04).
///
/// # Errors
/// The driver's code for it.
pub(crate) fn export(allocation: Id) -> Result<Option<OwnedFd>, CUresult> {
    let source = registry().allocations.get(&allocation).map(|allocation| allocation.source.clone());
    match source.ok_or(INVALID_VALUE)? {
        Source::Created(_) | Source::Multicast(_) => match tried(|| offer(allocation)) {
            Ok(descriptor) => Ok(Some(descriptor)),
            Err(ShareError::Failed(result)) => Err(result),
            Err(ShareError::Away | ShareError::NotYet) => Ok(None),
        },
        Source::Shared(_) => Err(INVALID_VALUE),
        Source::Unknown => Ok(None),
    }
}

fn offer(allocation: Id) -> Result<OwnedFd, ShareError> {
    let mut offered = None;
    while offered.is_none() {
        let tried = fork::while_none(|| offer_once(allocation));
        // Another thread may have been faster.
        send_notices();
        offered = tried?;
    }
    offered.ok_or(ShareError::Failed(INVALID_VALUE))
}

/// `None` if another thread has just published the memory.
fn offer_once(allocation: Id) -> Result<Option<OwnedFd>, ShareError> {
    let published = key_of(allocation);
    let table = TABLE.lock();
    let root = published.and_then(|key| table.root(key));
    if let Some(descriptor) = root.and_then(|root| root.descriptor().ok()) {
        return Ok(Some(descriptor));
    }
    drop(table);
    let key = published.or_else(random_key).ok_or(OUT_OF_MEMORY)?;
    let bytes = physical::handle_and_bytes(allocation).ok_or(INVALID_VALUE)?.1;
    let is_multicast = physical::is_object(allocation);
    let kind = if is_multicast { Kind::Multicast } else { Kind::Memory };
    let capability = Capability { key, bytes, owner: std::process::id(), kind };
    let (descriptor, root) = capability.create().map_err(|_| OUT_OF_MEMORY)?;
    if published.is_none() {
        let memory = launcher::descriptor_of(allocation)?;
        let for_launcher = root.as_ref().and_then(Root::as_fd);
        let shared = launcher::Publication { key, bytes, is_multicast };
        if !launcher::publish(&mut connect()?, shared, &memory, for_launcher)? {
            return Err(OUT_OF_MEMORY.into());
        }
        if published::record(allocation, key) != key {
            return Ok(None);
        }
    }
    // From here on, its release does not end it.
    if !physical::keep(allocation) {
        PUBLISHED.lock().remove(&allocation);
        NOTICES.lock().withdraw(key);
        return Err(INVALID_VALUE.into());
    }
    TABLE.lock().add_export(key, allocation, root);
    Ok(Some(descriptor))
}

/// Imports memory by a descriptor of ours, with one reference; `None` if the descriptor is not ours.
pub(crate) fn import(descriptor: c_int) -> Option<Result<Id, CUresult>> {
    let found = Capability::read(descriptor)?;
    if found.kind == Kind::Pool {
        return Some(Err(INVALID_VALUE));
    }
    Some(tried(|| take_up(descriptor, &found)).map_err(CUresult::from))
}

/// A reference to the memory of a key, if this process has it already: it has one handle then, but for the mark of memory
/// of its own.
fn known(key: Key) -> Option<Id> {
    fork::while_none(|| {
        let table = TABLE.lock();
        table.exported(key).or_else(|| table.imported(key)).filter(|id| physical::retain(*id))
    })
}

fn take_up(descriptor: c_int, found: &Capability) -> Result<Id, ShareError> {
    if let Some(known) = known(found.key) {
        return Ok(known);
    }
    if found.owner == std::process::id() {
        // It is of the program that this process has executed before.
        return Err(INVALID_VALUE.into());
    }
    let imported = fork::while_none(|| {
        let mut launcher = connect()?;
        let fetched = NOTICES.lock().fetch(&mut launcher, found.key, found.owner)?;
        let (memory, bytes) = fetched.ok_or(INVALID_VALUE)?;
        drop(launcher);
        let imported = Hold::of(descriptor).map_err(|_| OPERATING_SYSTEM).and_then(|hold| {
            let handle = relaxed(|| physical::import_handle(memory.as_fd()))?;
            Ok((hold, handle))
        });
        let (hold, handle) = imported.inspect_err(|_| NOTICES.lock().unmapped(found.key))?;
        let source = Source::Shared(found.key);
        let mine = if found.kind == Kind::Multicast {
            physical::adopt_object(bytes, source, handle)
        } else {
            let device = physical::device_of(handle).unwrap_or(0);
            physical::adopt(RegionKind::Program, bytes, device, source, handle)
        };
        let mut table = TABLE.lock();
        let first = table.imported(found.key).filter(|id| physical::retain(*id));
        if first.is_none() {
            table.add_import(found.key, mine, found.owner, hold);
        }
        Ok::<_, ShareError>((mine, first))
    });
    let (mine, first) = imported.inspect_err(|_| send_notices())?;
    if let Some(first) = first {
        // Another thread was faster.
        physical::release(mine);
        return Ok(first);
    }
    Ok(mine)
}

/// Ends memory that the program has released and of which no descriptor is left. Returns whether there was any.
pub(crate) fn sweep() -> bool {
    let kept = physical::kept();
    if kept.is_empty() {
        return false;
    }
    let ended: Vec<Id> = fork::while_none(|| {
        let mut table = TABLE.lock();
        let has_ended = |id: &Id| key_of(*id).is_some_and(|key| table.end_export(key));
        kept.into_iter().filter(has_ended).collect()
    });
    ended.iter().for_each(|id| physical::stop_keeping(*id));
    !ended.is_empty()
}

/// What is done when physical memory has ended: no process can have it any more, or this one has no more of another's.
pub(crate) fn ended(id: Id, allocation: &PhysicalAllocation) {
    allocation.parked.into_iter().for_each(published::withdraw_key);
    if !matches!(allocation.kind, RegionKind::Program | RegionKind::Pool) {
        return;
    }
    match allocation.source {
        Source::Created(_) | Source::Multicast(_) => published::withdraw(id),
        Source::Shared(key) => {
            fork::while_none(|| {
                TABLE.lock().forget_import(key, id);
                NOTICES.lock().unmapped(key);
            });
            send_notices();
        }
        Source::Unknown => {}
    }
}

/// In the child of a fork: closes what the parent keeps open, which would count as the parent's.
pub(crate) fn after_fork_in_child() {
    let table = TABLE.lock_after_fork().map(|mut table| std::mem::take(&mut *table));
    drop(table);
}
