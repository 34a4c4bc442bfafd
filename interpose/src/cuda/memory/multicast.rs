//! Multicast objects over a checkpoint: they go down before the memory that is bound to them, and come back after it.
//!
//! ```text
//!                    take_down: unmapped, unbound, released       all members are down
//!   on the devices ----------------------------------------> down ---------------------> ended
//!    ^  ^                                                      |                           |
//!    |  +------------------------------------------------------+                           |
//!    |     bring_back: imported again, bound, mapped                                       |
//!    +-------------------------------------------------------------------------------------+
//!          bring_back: created by the owner, imported by the others, all devices added, bound, mapped
//! ```
//!
//! The driver's checkpoint does not return while there is such an object (nccl pull request 2340), so that the launcher
//! keeps the descriptor of a shared one only until all its processes are down. These processes are the members of a cycle,
//! and take its steps together: none binds memory before all devices are added, since the driver would block (CUDA driver
//! API reference, cuMulticastAddDevice), and none runs before all have bound theirs.
//!
//! An object that no other process has, or may get, ends as soon as it is down.

pub(crate) mod calls;

use std::os::fd::AsFd;
use std::thread::sleep;
use std::time::{Duration, Instant};

use ckpt_protocol::agent::{
    Cycle, CycleStep, FromAgent, MulticastObject, Progress, ShareKey as Key, ToAgent,
};
use cuda_abi::types::{CUmemGenericAllocationHandle, CUmulticastObjectProp};

use super::error::MemoryError;
use super::ipc::{self, published::key_of};
use super::offload::{map_again, note};
use super::physical::{self, Binding, Id, Mapping, PhysicalAllocation, Source, Team, registry};
use crate::cuda::driver::{self, DriverError, check};
use crate::cuda::shared::Shared;
use crate::cuda::{faults, result::INVALID_VALUE};
use crate::fork;
use crate::link::Link;

/// The timeout for other processes that come back. A process that fails to ends the job.
const RETURN_TIMEOUT: Duration = Duration::from_secs(600);
/// The pause before a process asks again whether others have come to a step.
const ASK_AGAIN_INTERVAL: Duration = Duration::from_millis(2);

/// The cycle of the attempt under way, and whether shared objects have ended in it.
#[derive(Clone)]
struct Current {
    cycle: Cycle,
    has_ended: bool,
}

static CURRENT: Shared<Option<Current>> = Shared::new(None);

/// Whether processes that share objects with this one wait for it until it is back.
pub(crate) fn is_awaited() -> bool {
    CURRENT.lock().is_some()
}

/// In the child of a fork, which has no objects.
pub(crate) fn after_fork_in_child() {
    if let Some(mut current) = CURRENT.lock_after_fork() {
        *current = None;
    }
}

/// The object's key, if other processes have it or may get it.
fn shared_key(id: Id, object: &PhysicalAllocation) -> Option<Key> {
    match object.source {
        Source::Shared(key) => Some(key),
        _ => key_of(id),
    }
}

fn of_registry<T>(mut of: impl FnMut(Id, &PhysicalAllocation, &Team) -> Option<T>) -> Vec<T> {
    let registry = registry();
    let all = registry.allocations.iter();
    all.filter_map(|(id, object)| of(*id, object, object.team.as_ref()?)).collect()
}

/// Waits until all processes that share memory are drained, see [`ipc::await_drained`]; those that share multicast objects
/// take part in a cycle from then on.
///
/// # Errors
/// As there.
pub(crate) fn await_drained(launcher: &mut dyn Link, attempt: u64) -> Result<(), MemoryError> {
    let shared = of_registry(|id, object, team| {
        let team_size = match &object.source {
            Source::Multicast(properties) => Some(properties.numDevices),
            _ => None,
        };
        Some(MulticastObject {
            key: shared_key(id, object)?,
            devices: u32::try_from(team.devices.len()).unwrap_or(u32::MAX),
            team_size,
            is_used: !team.bindings.is_empty() || !object.mappings.is_empty(),
        })
    });
    let cycle = ipc::await_drained(launcher, attempt, shared)?;
    *CURRENT.lock() = cycle.map(|cycle| Current { cycle, has_ended: false });
    Ok(())
}

/// What an object has on the devices.
struct Present {
    id: Id,
    handle: CUmemGenericAllocationHandle,
    mappings: Vec<Mapping>,
    bindings: Vec<Binding>,
}

fn present() -> Vec<Present> {
    of_registry(|id, object, team| {
        (object.handle != 0).then(|| Present {
            id,
            handle: object.handle,
            mappings: object.mappings.iter().filter(|mapping| mapping.is_mapped).cloned().collect(),
            bindings: team.bindings.iter().filter(|binding| binding.is_bound).copied().collect(),
        })
    })
}

fn set_mapped(id: Id, mapping: &Mapping, is_mapped: bool) {
    note(id, |object| {
        let mut all = object.mappings.iter_mut();
        if let Some(one) = all.find(|one| one.address == mapping.address) {
            one.is_mapped = is_mapped;
        }
    });
}

fn set_bound(id: Id, binding: &Binding, is_bound: bool) {
    note(id, |object| {
        let mut all = object.team.iter_mut().flat_map(|team| &mut team.bindings);
        if let Some(one) = all.find(|one| one.is_at(binding.device, binding.offset, binding.bytes)) {
            one.is_bound = is_bound;
        }
    });
}

/// Takes all objects off the devices. Nothing runs on them.
///
/// # Errors
/// A driver call failed; [`bring_back`] restores what was taken down so far.
pub(crate) fn release() -> Result<(), DriverError> {
    for Present { id, handle, mappings, bindings } in present() {
        for mapping in &mappings {
            // SAFETY: the range is one whole mapping of ours, and nothing runs on the devices.
            check("cuMemUnmap", unsafe { driver::cuMemUnmap(mapping.address, mapping.bytes as usize) })?;
            set_mapped(id, mapping, false);
        }
        for binding in &bindings {
            physical::unbind(handle, binding)
                .map_err(|result| DriverError::new("cuMulticastUnbind", result))?;
            set_bound(id, binding, false);
        }
        // SAFETY: the handle is the registry's; it is not used while the process is being saved.
        check("cuMemRelease", unsafe { driver::cuMemRelease(handle) })?;
        note(id, |object| object.handle = 0);
    }
    Ok(())
}

/// Takes all objects off the devices, together with the other members of the cycle.
///
/// # Errors
/// A driver call failed, or the attempt; [`bring_back`] restores what was taken down so far.
pub(crate) fn take_down(launcher: &mut dyn Link) -> Result<(), MemoryError> {
    release()?;
    faults::hit("detach-multicast");
    let Some(current) = CURRENT.lock().clone() else { return Ok(()) };
    match arrive(launcher, &current.cycle, CycleStep::Down, MemoryError::NotDown) {
        Ok(()) => {
            *CURRENT.lock() = Some(Current { has_ended: true, ..current });
            faults::hit("detach-multicast-ended");
            Ok(())
        }
        Err(error) => Err(error),
    }
}

/// Comes to a step of the cycle, and waits for the other members. `failed` is the error if they do not come.
fn arrive(
    launcher: &mut dyn Link,
    cycle: &Cycle,
    step: CycleStep,
    failed: MemoryError,
) -> Result<(), MemoryError> {
    let begun = Instant::now();
    loop {
        let message = FromAgent::Arrive { pid: std::process::id(), cycle: cycle.clone(), step };
        match launcher.ask(&message, &[]) {
            Some((ToAgent::Arrived { progress: Progress::Complete }, _)) => return Ok(()),
            // That all are down the launcher alone decides: otherwise some would take the objects for alive.
            Some((ToAgent::Arrived { progress: Progress::Pending }, _))
                if step == CycleStep::Down || begun.elapsed() < RETURN_TIMEOUT =>
            {
                sleep(ASK_AGAIN_INTERVAL);
            }
            Some((ToAgent::Arrived { .. }, _)) => return Err(failed),
            _ => return Err(MemoryError::LauncherLost),
        }
    }
}

/// Where an object comes from that is off the devices.
enum Origin {
    /// Created anew: none of its devices is added. Other processes may get it.
    Ended(CUmulticastObjectProp),
    /// Imported.
    Shared { key: Key, has_ended: bool },
}

/// An object that is off the devices, and the devices that this process had added to it.
struct Missing {
    id: Id,
    origin: Origin,
    devices: Vec<i32>,
}

fn missing(has_ended: bool) -> Vec<Missing> {
    let mut missing = of_registry(|id, object, team| {
        let origin = match (&object.source, key_of(id)) {
            (Source::Multicast(_), Some(key)) if !has_ended => Origin::Shared { key, has_ended },
            (Source::Multicast(properties), _) => Origin::Ended(*properties),
            (Source::Shared(key), _) => Origin::Shared { key: *key, has_ended },
            (Source::Created(_) | Source::Unknown, _) => return None,
        };
        (object.handle == 0).then(|| Missing { id, origin, devices: team.devices.clone() })
    });
    // A process creates its own before it waits for those of others, which avoids deadlocks.
    missing.sort_by_key(|one| matches!(one.origin, Origin::Shared { .. }));
    missing
}

/// Brings all objects back, together with the other members of the cycle. All memory of the process is there.
///
/// # Errors
/// A driver call failed, or another process did not come back.
pub(crate) fn bring_back(launcher: &mut dyn Link) -> Result<(), MemoryError> {
    let current = CURRENT.lock().clone();
    let has_ended = current.as_ref().is_some_and(|current| current.has_ended);
    for object in missing(has_ended) {
        get_handle(launcher, &object)?;
    }
    faults::hit("attach-multicast-added");
    if let Some(current) = current.as_ref().filter(|_| has_ended) {
        arrive(launcher, &current.cycle, CycleStep::Added, MemoryError::NotBack)?;
    }
    bind_and_map()?;
    faults::hit("attach-multicast-bound");
    if let Some(current) = &current {
        arrive(launcher, &current.cycle, CycleStep::Bound, MemoryError::NotBack)?;
    }
    *CURRENT.lock() = None;
    Ok(())
}

/// Creates or imports an object, and adds the devices that it has lost.
fn get_handle(launcher: &mut dyn Link, object: &Missing) -> Result<(), MemoryError> {
    let id = object.id;
    let (handle, lacks_devices) = match &object.origin {
        Origin::Ended(properties) => (create(properties)?, true),
        Origin::Shared { key, has_ended } => (import(launcher, *key)?, *has_ended),
    };
    note(id, |object| object.handle = handle);
    if matches!(object.origin, Origin::Ended(_)) {
        ipc::republish(launcher, &[id])?;
    }
    for device in object.devices.iter().filter(|_| lacks_devices) {
        driver::retry(|| {
            // SAFETY: the call takes plain numbers.
            check("cuMulticastAddDevice", unsafe { driver::cuMulticastAddDevice(handle, *device) })
        })?;
    }
    Ok(())
}

fn create(properties: &CUmulticastObjectProp) -> Result<CUmemGenericAllocationHandle, DriverError> {
    driver::retry(|| {
        // SAFETY: the call writes to a local variable, the properties are a whole structure.
        driver::ask(0, |handle| unsafe { driver::cuMulticastCreate(handle, &raw const *properties) })
    })
    .map_err(|result| DriverError::new("cuMulticastCreate", result))
}

fn import(launcher: &mut dyn Link, key: Key) -> Result<CUmemGenericAllocationHandle, MemoryError> {
    let descriptor = ipc::fetch(launcher, key)?.ok_or(MemoryError::NotKept)?;
    fork::while_none(|| driver::retry(|| physical::import_handle(descriptor.as_fd())))
        .map_err(|result| DriverError::new("cuMemImportFromShareableHandle", result).into())
}

/// Binds and maps what is not. All devices of the objects are added.
fn bind_and_map() -> Result<(), MemoryError> {
    let waiting = of_registry(|id, object, team| {
        let unbound: Vec<Binding> =
            team.bindings.iter().filter(|binding| !binding.is_bound).copied().collect();
        let unmapped: Vec<Mapping> =
            object.mappings.iter().filter(|mapping| !mapping.is_mapped).cloned().collect();
        Some((id, object.handle, unbound, unmapped))
    });
    for (id, handle, unbound, unmapped) in waiting {
        for binding in &unbound {
            driver::retry(|| bind(handle, binding))?;
            set_bound(id, binding, true);
        }
        for mapping in &unmapped {
            map_again(id, handle, mapping)?;
        }
    }
    Ok(())
}

fn bind(object: CUmemGenericAllocationHandle, binding: &Binding) -> Result<(), DriverError> {
    let name = "cuMulticastBindMem";
    let found = physical::handle_and_bytes(binding.memory);
    let (memory, _) = found.ok_or_else(|| DriverError::new(name, INVALID_VALUE))?;
    let Binding { device, is_for_device, .. } = *binding;
    let [offset, memory_offset, bytes] =
        [binding.offset, binding.memory_offset, binding.bytes].map(|number| number as usize);
    let result = if is_for_device {
        // SAFETY: the call takes plain numbers.
        unsafe { driver::cuMulticastBindMem_v2(object, device, offset, memory, memory_offset, bytes, 0) }
    } else {
        // SAFETY: as above.
        unsafe { driver::cuMulticastBindMem(object, offset, memory, memory_offset, bytes, 0) }
    };
    check(name, result)
}
