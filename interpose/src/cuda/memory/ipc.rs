//! Device memory of one process in another: our own implementation of CUDA IPC, since the driver's does not support
//! mapped memory.
//!
//! ```text
//! owner                         launcher                      importer
//!   cuIpcGetMemHandle
//!     exports the physical allocation
//!     Publish{key} + memory --->
//!   (the program passes the handle, which is ours and has the key in it)
//!                                        <--- Fetch{key}  cuIpcOpenMemHandle
//!                                        ---> memory        maps the physical allocation
//!                                        <--- Withdraw    cuIpcCloseMemHandle, the last one
//!   cuMemFree: Withdraw ------>
//! ```
//!
//! A physical allocation is published once, as a whole: a process that opens an allocation in it can access its
//! neighbours, as with the driver's own IPC.
//!
//! At a checkpoint an owner's memory is saved as any other. An importer's is unmapped and fetched again. If the job
//! continues, the launcher has kept the memory. If it is resumed, each agent first publishes its own memory and then
//! fetches that of others, which avoids deadlocks.
//!
//! | module | does |
//! |---|---|
//! | `handle` | the 64 bytes that programs pass |
//! | `descriptors` | memory that programs pass by descriptors of cuMemExportToShareableHandle |
//! | `capability` | what such a descriptor is |
//! | `exchanged` | which memory was exported and imported by descriptors |
//! | `pools` | allocations of pools that processes share |
//! | `published` | memory of this process that others may open |
//! | `opened` | which memory of others is open |
//! | `launcher` | what is said to the launcher |

mod capability;
pub(crate) mod descriptors;
mod exchanged;
mod handle;
mod launcher;
mod opened;
pub(crate) mod pools;
pub(crate) mod published;

use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use ckpt_protocol::agent::{Cycle, FromAgent, MulticastObject, RegionKind, ShareKey as Key, ToAgent};
use cuda_abi::sys::{self, CUresult as Error};
use cuda_abi::types::{CUcontext, CUdeviceptr, CUipcMemHandle, CUresult};

use super::block::{self, Block};
use super::error::MemoryError;
use super::physical::{self, Id, Source};
use super::{arena, peer};
use crate::cuda::activation::is_started;
use crate::cuda::driver::DriverError;
use crate::cuda::handler::handlers;
use crate::cuda::result::{INVALID_CONTEXT, INVALID_VALUE, OUT_OF_MEMORY, SUCCESS};
use crate::cuda::stream_capture::relaxed;
use crate::cuda::{context, driver};
use crate::fork;
use crate::link::Link;
use capability::Root;
use cuda_abi::layout::Access;
use exchanged::TABLE;
use handle::Handle;
use opened::{Closed, IMPORTS, Import};
use published::{PUBLISHED, key_of, send_notices};

pub(crate) use opened::{Allocation as OpenedAllocation, Opener};

use launcher::{NOTICES, OWNER_TIMEOUT, Publication, ShareError, connect, tried};

/// The one flag that cuIpcOpenMemHandle has and needs.
const LAZY_ENABLE_PEER_ACCESS: c_uint = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as c_uint;

const MAP_FAILED: CUresult = Error::CUDA_ERROR_MAP_FAILED as CUresult;

/// An allocation of this process, and where it is in its physical allocation.
struct Own {
    allocation: Id,
    offset: u64,
    bytes: u64,
}

/// The allocation that begins at an address.
fn own(address: CUdeviceptr) -> Option<Own> {
    let found = arena::find(address).filter(|found| found.address == address)?;
    let (allocation, start, _) = physical::registry().at(address)?;
    Some(Own { allocation, offset: address - start, bytes: found.bytes })
}

handlers! {
    fn cuIpcGetMemHandle(out: *mut CUipcMemHandle, address: CUdeviceptr) |call| {
        let own = if is_started() { own(address) } else { None };
        let Some(own) = own.filter(|_| !out.is_null() && context::current().is_some()) else {
            return call();
        };
        match tried(|| share(own.allocation)) {
            Ok(key) => {
                let Own { offset, bytes, .. } = own;
                let handle = Handle { key, offset, bytes, owner: std::process::id(), pool: 0 };
                let handle = CUipcMemHandle { reserved: handle.encode().map(u8::cast_signed) };
                // SAFETY: the parameter is the caller's, of that type, and not null.
                unsafe { out.write_unaligned(handle) };
                SUCCESS
            }
            Err(ShareError::Failed(result)) => result,
            // There is no launcher that could pass the memory on: the driver says how that is with memory such as ours.
            Err(_) => call(),
        }
    }

    fn cuIpcOpenMemHandle_v2(out: *mut CUdeviceptr, handle: CUipcMemHandle, flags: c_uint) |call| {
        let ours = Handle::decode(&handle.reserved.map(i8::cast_unsigned));
        let Some(ours) = ours.filter(|ours| is_started() && ours.pool == 0) else {
            return call();
        };
        if out.is_null() || flags != LAZY_ENABLE_PEER_ACCESS {
            return INVALID_VALUE;
        }
        match tried(|| open(&ours)) {
            Ok(address) => {
                // SAFETY: the parameter is the caller's, of that type, and not null.
                unsafe { out.write_unaligned(address) };
                SUCCESS
            }
            Err(ShareError::Failed(result)) => result,
            Err(ShareError::Away) => MAP_FAILED,
            Err(ShareError::NotYet) => INVALID_VALUE,
        }
    }

    fn cuIpcCloseMemHandle(address: CUdeviceptr) |call| {
        let found = if is_started() { find_opened(address) } else { None };
        let Some(Opener::Context(opener)) =
            found.filter(|found| found.address == address).map(|found| found.opener)
        else {
            return call();
        };
        if context::current().is_none() {
            return INVALID_CONTEXT;
        }
        // What was submitted may still use it. A removed context has no work.
        let result = context::within(opener as CUcontext, arena::synchronize).unwrap_or(SUCCESS);
        if result != SUCCESS {
            return result;
        }
        let closed = IMPORTS.lock().close(address);
        match closed {
            Some(Closed::Unused(import)) => give_back(import),
            Some(Closed::Open) => {}
            None => return INVALID_VALUE,
        }
        SUCCESS
    }
}

/// What programs built before CUDA 11.0 call; the parameters are the same.
pub(crate) use cuIpcOpenMemHandle_v2 as cuIpcOpenMemHandle;

/// The allocation of another process that an address lies in.
pub(crate) fn find_opened(address: CUdeviceptr) -> Option<OpenedAllocation> {
    IMPORTS.lock().find(address)
}

/// Closes what a context has open, which is being destroyed.
pub(crate) fn context_removed(context: CUcontext) {
    let removed = IMPORTS.lock().take_all_of(Opener::Context(context as usize));
    removed.into_iter().for_each(give_back);
}

/// Publishes a physical allocation, if it is not; returns its key.
fn share(allocation: Id) -> Result<Key, ShareError> {
    let shared = fork::while_none(|| {
        if let Some(key) = PUBLISHED.lock().get(&allocation) {
            return Ok(*key);
        }
        let bytes = physical::handle_and_bytes(allocation).ok_or(INVALID_VALUE)?.1;
        let memory = launcher::descriptor_of(allocation)?;
        let key = random_key().ok_or(OUT_OF_MEMORY)?;
        let shared = Publication { key, bytes, is_multicast: false };
        if !launcher::publish(&mut connect()?, shared, &memory, None)? {
            return Err(OUT_OF_MEMORY.into());
        }
        Ok(published::record(allocation, key))
    });
    send_notices();
    shared
}

pub(crate) fn random_key() -> Option<Key> {
    let mut bytes = [0_u8; 16];
    // SAFETY: the pointer and the length are those of one live buffer.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    (usize::try_from(got) == Ok(bytes.len())).then(|| Key(u128::from_ne_bytes(bytes)))
}

/// Opens an allocation in the current context; returns its address.
fn open(handle: &Handle) -> Result<CUdeviceptr, ShareError> {
    let (context, device) = context::current().ok_or(INVALID_CONTEXT)?;
    arena::permitted()?;
    // CUDA driver API reference, cuIpcOpenMemHandle.
    if is_own(handle.key) {
        return Err(INVALID_CONTEXT.into());
    }
    open_for(Opener::Context(context as usize), handle, device, |block| allow(block, device))
}

fn is_own(key: Key) -> bool {
    PUBLISHED.lock().values().any(|own| *own == key)
}

/// Opens an allocation, on which `allow` grants access if it is not mapped for the opener yet.
fn open_for(
    opener: Opener,
    handle: &Handle,
    device: c_int,
    allow: impl Fn(&Block) -> Result<(), CUresult>,
) -> Result<CUdeviceptr, ShareError> {
    loop {
        let address = IMPORTS.lock().open(handle, opener);
        if let Some(address) = address {
            return Ok(address);
        }
        let import = fork::while_none(|| {
            let mut launcher = connect()?;
            let found = NOTICES.lock().fetch(&mut launcher, handle.key, handle.owner)?;
            let (memory, bytes) = found.ok_or(INVALID_VALUE)?;
            drop(launcher);
            import(handle, bytes, memory.as_fd(), (opener, device), &allow)
                .inspect_err(|_| NOTICES.lock().unmapped(handle.key))
        });
        let import = import.inspect_err(|_| send_notices())?;
        let added = IMPORTS.lock().add(import);
        if let Err(surplus) = added {
            give_back(surplus);
        }
    }
}

/// Maps another process's memory into addresses of its own.
fn import(
    handle: &Handle,
    bytes: u64,
    memory: BorrowedFd<'_>,
    (opener, device): (Opener, c_int),
    allow: impl Fn(&Block) -> Result<(), CUresult>,
) -> Result<Import, ShareError> {
    if !handle.fits(bytes) {
        return Err(INVALID_VALUE.into());
    }
    relaxed(|| {
        let imported = physical::import_handle(memory)?;
        let source = Source::Shared(handle.key);
        let allocation = physical::adopt(RegionKind::Allocation, bytes, device, source, imported);
        let address = Block::map(allocation, bytes, &allow)?.address;
        Ok(Import {
            key: handle.key,
            owner: handle.owner,
            opener,
            address,
            bytes,
            allocations: BTreeMap::new(),
        })
    })
}

/// Grants access to the context's device, and to the peers of the allocation's own device.
fn allow(block: &Block, device: c_int) -> Result<(), CUresult> {
    let home = home_of(block.allocation).unwrap_or(device);
    peer::grant(home, block.address, block.bytes)?;
    if home == device {
        return Ok(());
    }
    physical::set_access(block.address, block.bytes, &[Access::of(device)])
}

/// Finds out the device of a physical allocation and records it.
fn home_of(allocation: Id) -> Option<c_int> {
    let (handle, _) = physical::handle_and_bytes(allocation)?;
    let home = physical::device_of(handle)?;
    physical::registry().allocations.get_mut(&allocation)?.device = home;
    Some(home)
}

/// Unmaps memory that is no longer open.
fn give_back(import: Import) {
    relaxed(|| block::give_back(import.address, import.bytes));
    fork::while_none(|| NOTICES.lock().unmapped(import.key));
    send_notices();
}

// Over a checkpoint, by the agent, on its own connection. Nobody is inside the gate then.

/// Whether this process shares memory with another one, so that it may not capture before all are drained.
pub(crate) fn is_sharing() -> bool {
    !PUBLISHED.lock().is_empty()
        || !IMPORTS.lock().is_empty()
        || fork::while_none(|| TABLE.lock().has_imports())
}

/// Whether this process is likely to share memory that it does not share now: between two checkpoints, or from the request
/// for a mirror to the capture.
pub(crate) fn may_share() -> bool {
    published::was_published()
        || is_sharing()
        || physical::registry().allocations.values().any(|allocation| allocation.team.is_some())
}

/// Waits until no process can write any more to memory that this one has shared: between draining and capturing. `objects`
/// are the multicast objects among that. Returns the cycle in which they go down and come back, if there are any.
///
/// # Errors
/// Another process is not drained in time, or the objects could not be brought back.
pub(crate) fn await_drained(
    launcher: &mut dyn Link,
    attempt: u64,
    objects: Vec<MulticastObject>,
) -> Result<Option<Cycle>, MemoryError> {
    // Processes that wait for this one have to know what it has closed meanwhile. A failure is not fatal: it is sent
    // again later.
    let _ = NOTICES.lock().send(launcher);
    if !is_sharing() {
        return Ok(None);
    }
    let needs_cycle = !objects.is_empty();
    let message = FromAgent::Drained { attempt, pid: std::process::id(), objects };
    match launcher.ask(&message, &[]) {
        Some((ToAgent::AllDrained { is_complete: true, cycle: None, .. }, _)) if needs_cycle => {
            Err(MemoryError::OldLauncher)
        }
        Some((ToAgent::AllDrained { is_complete: true, cycle, .. }, _)) => Ok(cycle),
        Some((ToAgent::AllDrained { problem: Some(problem), .. }, _)) => Err(MemoryError::Objects(problem)),
        Some((ToAgent::AllDrained { problem: None, .. }, _)) => Err(MemoryError::NotDrained),
        _ => Err(MemoryError::LauncherLost),
    }
}

/// The memory of a key, of this process or another one. `None` for memory of this process that the launcher does not
/// have: it has to be recreated and published. Memory of others is waited for.
///
/// # Errors
/// The memory is lost.
pub(crate) fn fetch(launcher: &mut dyn Link, key: Key) -> Result<Option<OwnedFd>, MemoryError> {
    let opened = IMPORTS.lock().owner_of(key);
    let owner = opened.or_else(|| fork::while_none(|| TABLE.lock().owner_of(key)));
    let begun = Instant::now();
    loop {
        match launcher::fetch(launcher, key, owner.unwrap_or_else(std::process::id)) {
            Ok(Some((memory, _))) => return Ok(Some(memory)),
            Ok(None) if owner.is_none() => return Ok(None),
            Err(ShareError::NotYet) if begun.elapsed() < OWNER_TIMEOUT => {
                std::thread::sleep(launcher::RETRY_INTERVAL);
            }
            Err(ShareError::Away | ShareError::Failed(_)) => return Err(MemoryError::LauncherLost),
            Ok(None) | Err(ShareError::NotYet) => {
                let owner = owner.unwrap_or_default();
                return Err(MemoryError::OwnerNotRestored { owner });
            }
        }
    }
}

/// Checks that all memory that others may have, or that is bound to multicast objects, is among the physical allocations
/// that leave the device: the driver would put it back as memory of this process alone (observed of r615). Multicast objects
/// themselves have left it. Nor may memory of the host stay, which the driver does not bring back (seen with 580.159.04), or
/// parked memory, which may have come back by a descriptor.
///
/// # Errors
/// Some of it has no room in the mirror: it was shared, or created on the host, after the mirror was asked for, or there is
/// no mirror.
pub(crate) fn check_all_leave(leaving: &[Id]) -> Result<(), MemoryError> {
    let published = PUBLISHED.lock().clone();
    let registry = physical::registry();
    let mut all = registry.allocations.iter().filter(|(_, allocation)| allocation.team.is_none());
    let stays = all.any(|(id, allocation)| {
        let is_of_host = matches!(allocation.source, Source::Created(properties) if properties.is_of_host());
        let is_shared = published.contains_key(id) || allocation.bound > 0;
        let has_to_leave = is_shared || is_of_host || allocation.parked.is_some();
        has_to_leave && leaving.binary_search(id).is_err()
    });
    if stays { Err(MemoryError::SharedTooLate) } else { Ok(()) }
}

/// Publishes recreated physical allocations of this process under their former keys, and sends pending messages.
///
/// # Errors
/// The driver, or the launcher, refuses.
pub(crate) fn republish(launcher: &mut dyn Link, allocations: &[Id]) -> Result<(), MemoryError> {
    let lost = |launcher::ConnectionLost| MemoryError::LauncherLost;
    // A failure is not fatal: it is sent again later.
    let _ = NOTICES.lock().send(launcher);
    for allocation in allocations {
        let Some(key) = key_of(*allocation) else { continue };
        let Some((handle, bytes)) = physical::handle_and_bytes(*allocation) else { continue };
        let failed = |result| MemoryError::Export(DriverError::new("cuMemExportToShareableHandle", result));
        let is_kept = fork::while_none(|| {
            let memory = driver::retry(|| physical::export(handle)).map_err(failed)?;
            let table = TABLE.lock();
            let root = table.root(key).and_then(Root::as_fd);
            let shared = Publication { key, bytes, is_multicast: physical::is_object(*allocation) };
            launcher::publish(launcher, shared, &memory, root).map_err(lost)
        });
        if !is_kept? {
            return Err(MemoryError::NotKept);
        }
    }
    Ok(())
}
