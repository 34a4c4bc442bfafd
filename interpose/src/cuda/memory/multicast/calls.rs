//! The program's calls of multicast objects.
//!
//! A multicast object is in the [registry](physical) of physical allocations, and has a handle of ours as they have. Of an
//! object of unknown origin the calls are passed on, and rule a checkpoint out for good: when its bindings end is not seen.

use std::ffi::{c_int, c_ulonglong};

use ckpt_protocol::agent::RegionKind;
use cuda_abi::layout::POSIX_DESCRIPTOR;
use cuda_abi::types::{CUdevice, CUdeviceptr, CUmemGenericAllocationHandle, CUmulticastObjectProp, CUresult};

use crate::cuda::activation::is_started;
use crate::cuda::handler::handlers;
use crate::cuda::memory::ipc::descriptors;
use crate::cuda::memory::physical::{self, Binding, Id, Source, registry};
use crate::cuda::memory::vmm::{self, Named, named};
use crate::cuda::result::{INVALID_VALUE, SUCCESS};
use crate::cuda::taint;

handlers! {
    fn cuMulticastCreate(object: *mut CUmemGenericAllocationHandle, properties: *const CUmulticastObjectProp) |call| {
        descriptors::sweep();
        let result = call();
        if result != SUCCESS || !is_started() {
            return result;
        }
        // SAFETY: the driver has just written it.
        let created = unsafe { object.read_unaligned() };
        // SAFETY: the driver has just read such a structure there, which has numbers only.
        let properties = unsafe { properties.read_unaligned() };
        let id = physical::adopt_object(properties.size as u64, Source::Multicast(properties), created);
        if properties.flags != 0 || properties.handleTypes & !u64::from(POSIX_DESCRIPTOR.0) != 0 {
            physical::hinder(id, "cuMulticastCreate");
        }
        // SAFETY: as above.
        unsafe { object.write_unaligned(vmm::handle_of(id)) };
        SUCCESS
    }

    fn cuMulticastAddDevice(object: CUmemGenericAllocationHandle, device: CUdevice) |call, real| {
        let (id, handle) = match named(object) {
            Named::MappedAllocation { id, handle } => (id, handle),
            Named::Gone => return INVALID_VALUE,
            Named::Other => return unknown("cuMulticastAddDevice", call()),
        };
        // SAFETY: the parameters are those of our own caller, but for the handle, which is the driver's of it.
        let result = unsafe { real(handle, device) };
        if result == SUCCESS && !note_device(id, device) {
            taint::mark("cuMulticastAddDevice", result);
        }
        result
    }

    fn cuMulticastBindMem(
        object: CUmemGenericAllocationHandle, object_offset: usize, memory: CUmemGenericAllocationHandle,
        offset: usize, bytes: usize, flags: c_ulonglong
    ) |_, real| {
        let place = Place { device: None, offset: object_offset, bytes };
        bind("cuMulticastBindMem", object, place, Memory::of_handle(memory, offset), |object, memory| {
            // SAFETY: the parameters are those of our own caller, with the driver's handles.
            unsafe { real(object, object_offset, memory, offset, bytes, flags) }
        })
    }

    fn cuMulticastBindMem_v2(
        object: CUmemGenericAllocationHandle, device: CUdevice, object_offset: usize,
        memory: CUmemGenericAllocationHandle, offset: usize, bytes: usize, flags: c_ulonglong
    ) |_, real| {
        let place = Place { device: Some(device), offset: object_offset, bytes };
        bind("cuMulticastBindMem_v2", object, place, Memory::of_handle(memory, offset), |object, memory| {
            // SAFETY: the parameters are those of our own caller, with the driver's handles.
            unsafe { real(object, device, object_offset, memory, offset, bytes, flags) }
        })
    }

    fn cuMulticastBindAddr(
        object: CUmemGenericAllocationHandle, offset: usize, address: CUdeviceptr, bytes: usize,
        flags: c_ulonglong
    ) |_, real| {
        let place = Place { device: None, offset, bytes };
        bind("cuMulticastBindAddr", object, place, Memory::at(address), |object, _| {
            // SAFETY: the parameters are those of our own caller, with the driver's handle.
            unsafe { real(object, offset, address, bytes, flags) }
        })
    }

    fn cuMulticastBindAddr_v2(
        object: CUmemGenericAllocationHandle, device: CUdevice, offset: usize, address: CUdeviceptr,
        bytes: usize, flags: c_ulonglong
    ) |_, real| {
        let place = Place { device: Some(device), offset, bytes };
        bind("cuMulticastBindAddr_v2", object, place, Memory::at(address), |object, _| {
            // SAFETY: the parameters are those of our own caller, with the driver's handle.
            unsafe { real(object, device, offset, address, bytes, flags) }
        })
    }

    fn cuMulticastUnbind(
        object: CUmemGenericAllocationHandle, device: CUdevice, offset: usize, bytes: usize
    ) |call, real| {
        let (id, handle) = match named(object) {
            Named::MappedAllocation { id, handle } => (id, handle),
            Named::Gone => return INVALID_VALUE,
            Named::Other => return call(),
        };
        // Before the call: at its end, another thread may have bound something else there.
        let binding = take_binding(id, device, offset as u64, bytes as u64);
        // SAFETY: the parameters are those of our own caller, but for the handle, which is the driver's of it.
        let result = unsafe { real(handle, device, offset, bytes) };
        match binding {
            Some(binding) if result == SUCCESS => physical::let_go_bound(binding.memory),
            Some(binding) => _ = note_binding(id, binding),
            None => {}
        }
        result
    }
}

/// Marks the process after a call of an object of unknown origin.
fn unknown(call: &'static str, result: CUresult) -> CUresult {
    if is_started() {
        taint::mark(call, result);
    }
    result
}

/// False if the object is not known as one.
fn note_device(id: Id, device: c_int) -> bool {
    let mut registry = registry();
    let team = registry.allocations.get_mut(&id).and_then(|object| object.team.as_mut());
    team.map(|team| team.devices.push(device)).is_some()
}

/// False if the object is not known as one.
fn note_binding(id: Id, binding: Binding) -> bool {
    let mut registry = registry();
    let team = registry.allocations.get_mut(&id).and_then(|object| object.team.as_mut());
    team.map(|team| team.bindings.push(binding)).is_some()
}

fn take_binding(id: Id, device: c_int, offset: u64, bytes: u64) -> Option<Binding> {
    let mut registry = registry();
    let bindings = &mut registry.allocations.get_mut(&id)?.team.as_mut()?.bindings;
    let index = bindings.iter().position(|binding| binding.is_at(device, offset, bytes))?;
    Some(bindings.swap_remove(index))
}

/// The part of an object that memory is bound to.
struct Place {
    /// As the second versions of the calls name it.
    device: Option<CUdevice>,
    offset: usize,
    bytes: usize,
}

/// The memory that a program binds.
enum Memory {
    /// In the registry: the driver's handle, and the offset in it.
    Known { id: Id, handle: CUmemGenericAllocationHandle, offset: u64 },
    /// The driver's own: the handle, if it has any.
    Unknown(CUmemGenericAllocationHandle),
    /// A handle of ours that is no longer valid, or memory that programs may not bind.
    Invalid,
}

impl Memory {
    fn of_handle(handle: CUmemGenericAllocationHandle, offset: usize) -> Self {
        match named(handle) {
            Named::MappedAllocation { id, handle } => Self::Known { id, handle, offset: offset as u64 },
            Named::Other => Self::Unknown(handle),
            Named::Gone => Self::Invalid,
        }
    }

    /// Only memory of cuMemCreate and of pools can be bound by its address (CUDA driver API reference,
    /// cuMulticastBindAddr).
    fn at(address: CUdeviceptr) -> Self {
        if !is_started() {
            return Self::Unknown(0);
        }
        let registry = registry();
        let Some((id, start, _)) = registry.at(address) else { return Self::Unknown(0) };
        let Some(allocation) = registry.allocations.get(&id) else { return Self::Unknown(0) };
        match allocation.kind {
            RegionKind::Program | RegionKind::Pool => {
                Self::Known { id, handle: allocation.handle, offset: address - start }
            }
            RegionKind::Allocation | RegionKind::Slab => Self::Invalid,
        }
    }
}

/// Whether memory that no other process may have would be bound to an object that others have or may get. The driver
/// refuses that (CUDA driver API reference, cuMulticastBindMem), but it sees memory that can be exported: the interposer
/// asks for that.
fn is_too_private(object: Id, memory: Id) -> bool {
    let is_shared = vmm::asked_handle_types(object).is_none_or(|types| types != 0);
    is_shared && vmm::asked_handle_types(memory) == Some(0)
}

/// Binds memory, which `call` does with the driver's handles of the object and the memory.
fn bind(
    name: &'static str,
    object: CUmemGenericAllocationHandle,
    place: Place,
    memory: Memory,
    call: impl FnOnce(CUmemGenericAllocationHandle, CUmemGenericAllocationHandle) -> CUresult,
) -> CUresult {
    let (object, object_handle) = match named(object) {
        Named::MappedAllocation { id, handle } => (Some(id), handle),
        Named::Other => (None, object),
        Named::Gone => return INVALID_VALUE,
    };
    let (memory, handle, memory_offset) = match memory {
        Memory::Known { id, handle, offset } => (id, handle, offset),
        Memory::Unknown(handle) => return unknown(name, call(object_handle, handle)),
        Memory::Invalid => return INVALID_VALUE,
    };
    let Some(object) = object else { return unknown(name, call(object_handle, handle)) };
    if is_too_private(object, memory) {
        return INVALID_VALUE;
    }
    // From here on neither ends, until the call has returned.
    let Some(home) = physical::hold_bound(memory) else { return INVALID_VALUE };
    if !physical::retain(object) {
        physical::let_go_bound(memory);
        return INVALID_VALUE;
    }
    let result = call(object_handle, handle);
    if result == SUCCESS {
        let binding = Binding {
            memory,
            memory_offset,
            offset: place.offset as u64,
            bytes: place.bytes as u64,
            device: place.device.unwrap_or(home),
            is_for_device: place.device.is_some(),
            is_bound: true,
        };
        if !note_binding(object, binding) {
            taint::mark(name, result);
        }
    } else {
        physical::let_go_bound(memory);
    }
    physical::release(object);
    result
}
