use std::os::fd::{FromRawFd, OwnedFd};
use std::ptr::null;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use cuda_abi::sys;

use super::*;
use crate::cuda::driver;
use crate::cuda::exports as program;
use crate::cuda::memory::attributes::program_attribute;
use crate::cuda::memory::physical::registry;
use crate::cuda::testing::{alone, alone_under};

const UNIT: usize = 2 << 20;

/// Calls the driver as the program does; returns the result.
macro_rules! result {
    ($name:ident($($arg:expr),* $(,)?)) => {
        // SAFETY: the parameters are local variables, handles that were given out, and numbers.
        unsafe { program::$name($($arg),*) }
    };
}

macro_rules! call {
    ($name:ident($($arg:expr),* $(,)?)) => {
        assert_eq!(result!($name($($arg),*)), SUCCESS, stringify!($name))
    };
}

fn create(handle_types: u32) -> CUmemGenericAllocationHandle {
    let properties = Properties { handle_types, ..Properties::of(0) };
    let mut handle = 0;
    call!(cuMemCreate(&raw mut handle, UNIT, (&raw const properties).cast(), 0));
    handle
}

fn reserve(bytes: usize) -> CUdeviceptr {
    let mut address = 0;
    call!(cuMemAddressReserve(&raw mut address, bytes, 0, 0, 0));
    address
}

fn handle_types(handle: CUmemGenericAllocationHandle) -> u32 {
    let mut properties = Properties::of(7);
    call!(cuMemGetAllocationPropertiesFromHandle((&raw mut properties).cast(), handle));
    assert_eq!(properties.location.id, 0);
    properties.handle_types
}

fn export(handle: CUmemGenericAllocationHandle) -> Result<OwnedFd, CUresult> {
    let mut descriptor: c_int = -1;
    let result =
        result!(cuMemExportToShareableHandle((&raw mut descriptor).cast(), handle, POSIX_DESCRIPTOR, 0));
    // SAFETY: the driver has made it for us.
    if result == SUCCESS { Ok(unsafe { OwnedFd::from_raw_fd(descriptor) }) } else { Err(result) }
}

fn import(descriptor: &OwnedFd) -> CUmemGenericAllocationHandle {
    use std::os::fd::AsRawFd;
    let mut handle = 0;
    let shareable = descriptor.as_raw_fd() as usize as *mut c_void;
    call!(cuMemImportFromShareableHandle(&raw mut handle, shareable, POSIX_DESCRIPTOR));
    handle
}

fn driver_handle(handle: CUmemGenericAllocationHandle) -> CUmemGenericAllocationHandle {
    to_driver(handle).expect("alive")
}

/// How much physical memory this process holds, as mappings and descriptors of simcuda's. To use the handle of memory that is
/// gone would end the process.
fn held() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("the mappings");
    let links = std::fs::read_dir("/proc/self/fd").expect("the descriptors").flatten();
    let targets = links.filter_map(|link| link.path().read_link().ok());
    let is_segment = |line: &str| line.contains("/segment-");
    maps.lines().filter(|line| is_segment(line)).count()
        + targets.filter(|target| target.to_str().is_some_and(is_segment)).count()
}

/// Whether the driver knows one of its own handles.
fn is_known(handle: CUmemGenericAllocationHandle) -> bool {
    let mut properties = Properties::of(0);
    // SAFETY: `properties` is a local variable.
    let result =
        unsafe { driver::cuMemGetAllocationPropertiesFromHandle((&raw mut properties).cast(), handle) };
    result == SUCCESS
}

/// A name in [`taint`]'s reason, for all that stands against a checkpoint.
fn refused_for(call: &str) -> bool {
    taint::obstacle().is_some_and(|reason| reason.contains(call))
}

#[test]
fn handles_of_ours_are_told_from_others() {
    for id in [1, 2, 77, (1 << ID_BITS) - 1] {
        assert_eq!(id_of(handle_of(id)), Some(id));
        // The driver's may be numbers or addresses, of the kernel too.
        assert_eq!(id_of(id), None);
        assert_eq!(id_of(id | 0xffff << 48), None);
        assert_eq!(id_of(handle_of(id) | REIMPORTED), Some(id));
    }
    assert_eq!(id_of(0), None);
    assert_eq!(id_of(u64::MAX), None);
}

/// What happens to a physical allocation in a checkpoint: the driver's handle becomes another one.
#[test]
fn a_handle_stays_when_its_memory_is_made_anew() {
    alone("cuda::memory::vmm::tests::a_handle_stays_when_its_memory_is_made_anew", || {
        let before = held();
        let handle = create(0);
        assert!(held() > before);
        let id = id_of(handle).expect("one of ours");
        let old = driver_handle(handle);
        assert_ne!(old, handle);
        let new = physical::create_handle(UNIT as u64, &Properties::of(0)).expect("memory");
        registry().allocations.get_mut(&id).expect("alive").handle = new;
        // SAFETY: nobody has it any more.
        assert_eq!(unsafe { driver::cuMemRelease(old) }, SUCCESS);
        let address = reserve(UNIT);
        call!(cuMemMap(address, UNIT, 0, handle, 0));
        let mut again = 0;
        call!(cuMemRetainAllocationHandle(&raw mut again, address as *mut c_void));
        assert_eq!(again, handle);
        assert_eq!(handle_types(handle), 0);
        let access = Access::of(0);
        call!(cuMemSetAccess(address, UNIT, (&raw const access).cast(), 1));
        assert!(registry().allocations[&id].mappings[0].access[0].is_all_for(0));
        for _ in 0..2 {
            assert!(is_known(new));
            call!(cuMemRelease(handle));
        }
        assert_eq!(result!(cuMemRelease(handle)), INVALID_VALUE);
        call!(cuMemUnmap(address, UNIT));
        assert_eq!(held(), before);
        assert!(registry().allocations.is_empty());
    });
}

#[test]
fn what_was_added_to_a_handle_is_not_shown() {
    alone("cuda::memory::vmm::tests::what_was_added_to_a_handle_is_not_shown", || {
        let (plain, exportable) = (create(0), create(POSIX_DESCRIPTOR.0));
        assert_eq!([plain, exportable].map(handle_types), [0, POSIX_DESCRIPTOR.0]);
        // That we can export it the program does not see.
        physical::export(driver_handle(plain)).expect("a descriptor");
        assert_eq!(export(plain).map(|_| ()), Err(INVALID_VALUE));
        export(exportable).expect("a descriptor");
        let address = reserve(2 * UNIT);
        let second = address + UNIT as u64;
        call!(cuMemMap(address, UNIT, 0, plain, 0));
        call!(cuMemMap(second, UNIT, 0, exportable, 0));
        let types = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES as u32;
        let buffer = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID as u32;
        assert_eq!(program_attribute(address + 5, types), Some(0));
        assert_eq!(program_attribute(second, types), Some(POSIX_DESCRIPTOR.0.into()));
        assert_eq!(program_attribute(second + 5, buffer), Some(exportable));
        assert_eq!(program_attribute(second + UNIT as u64, buffer), None);
    });
}

#[test]
fn shared_memory_stands_against_a_checkpoint_while_it_lives() {
    alone("cuda::memory::vmm::tests::shared_memory_stands_against_a_checkpoint_while_it_lives", || {
        let handle = create(POSIX_DESCRIPTOR.0);
        assert_eq!(taint::obstacle(), None);
        let descriptor = export(handle).expect("a descriptor");
        drop(export(handle).expect("another"));
        assert!(refused_for("cuMemExportToShareableHandle"));
        let imported = import(&descriptor);
        assert_ne!(imported, handle);
        drop(descriptor);
        // It lives on in its mapping.
        let address = reserve(UNIT);
        call!(cuMemMap(address, UNIT, 0, handle, 0));
        call!(cuMemRelease(handle));
        assert!(refused_for("cuMemExportToShareableHandle"));
        call!(cuMemUnmap(address, UNIT));
        assert!(refused_for("cuMemImportFromShareableHandle"));
        // What is imported is used like any other, but not exported.
        assert_eq!(export(imported).map(|_| ()), Err(INVALID_VALUE));
        call!(cuMemMap(address, UNIT, 0, imported, 0));
        call!(cuMemUnmap(address, UNIT));
        call!(cuMemRelease(imported));
        assert_eq!(taint::obstacle(), None);
        assert!(registry().allocations.is_empty());
    });
}

#[test]
fn memory_of_allocations_is_not_the_programs_to_map() {
    alone("cuda::memory::vmm::tests::memory_of_allocations_is_not_the_programs_to_map", || {
        let id = physical::create(RegionKind::Slab, UNIT as u64, &Properties::of(0)).expect("memory");
        let address = reserve(2 * UNIT);
        physical::map(id, address, UNIT as u64).expect("mapped");
        let (access, location) = (Access::of(0), Access::of(0).location);
        let (mut handle, mut flags) = (0, 0);
        let inside = (address + 512) as *mut c_void;
        assert_eq!(result!(cuMemRetainAllocationHandle(&raw mut handle, inside)), INVALID_VALUE);
        assert_eq!(result!(cuMemUnmap(address, UNIT)), INVALID_VALUE);
        assert_eq!(result!(cuMemSetAccess(address, UNIT, (&raw const access).cast(), 1)), INVALID_VALUE);
        assert_eq!(result!(cuMemGetAccess(&raw mut flags, &raw const location, address)), INVALID_VALUE);
        assert_eq!(result!(cuMemRelease(handle_of(id))), INVALID_VALUE);
        assert_eq!(result!(cuMemMap(address + UNIT as u64, UNIT, 0, handle_of(id), 0)), INVALID_VALUE);
        assert_eq!(registry().allocations[&id].mappings.len(), 1);
    });
}

fn array_info(handle: CUmemGenericAllocationHandle) -> MaybeUninit<CUarrayMapInfo> {
    let mut info = MaybeUninit::<CUarrayMapInfo>::zeroed();
    // SAFETY: the field of a local variable.
    let place = unsafe { &raw mut (*info.as_mut_ptr()).memHandle };
    // SAFETY: as above.
    unsafe { place.cast::<CUmemGenericAllocationHandle>().write(handle) };
    info
}

/// What a driver that can do more than simcuda was last passed as a handle.
static PASSED: AtomicU64 = AtomicU64::new(0);

extern "C" fn map_array(list: *mut CUarrayMapInfo, count: c_uint, _: CUstream) -> CUresult {
    assert_eq!(count, 2);
    // SAFETY: the second of two.
    let second = unsafe { list.add(1) };
    // SAFETY: as above.
    let place = unsafe { &raw const (*second).memHandle };
    // SAFETY: as above; the field is filled in.
    let handle = unsafe { place.cast::<CUmemGenericAllocationHandle>().read() };
    PASSED.store(handle, SeqCst);
    SUCCESS
}

extern "C" fn map_with_offset(
    _: CUdeviceptr,
    _: usize,
    _: usize,
    handle: CUmemGenericAllocationHandle,
    _: c_ulonglong,
) -> CUresult {
    PASSED.store(handle, SeqCst);
    SUCCESS
}

extern "C" fn give_range(
    _: *mut c_void,
    _: CUdeviceptr,
    _: usize,
    _: CUmemRangeHandleType,
    _: c_ulonglong,
) -> CUresult {
    SUCCESS
}

/// What simcuda refuses and another driver may do.
#[test]
fn what_cannot_be_done_anew_stands_against_a_checkpoint_while_the_memory_lives() {
    let test = "what_cannot_be_done_anew_stands_against_a_checkpoint_while_the_memory_lives";
    alone(&format!("cuda::memory::vmm::tests::{test}"), || {
        let handle = create(0);
        let mut infos = [array_info(0), array_info(handle)];
        let infos = infos.as_mut_ptr().cast();
        // SAFETY: two of them.
        assert_eq!(unsafe { cuMemMapArrayAsync(map_array, infos, 2, std::ptr::null_mut()) }, SUCCESS);
        assert_eq!(PASSED.swap(0, SeqCst), driver_handle(handle));
        assert!(refused_for("cuMemMapArrayAsync"));
        call!(cuMemRelease(handle));
        assert_eq!(taint::obstacle(), None);

        let handle = create(0);
        // SAFETY: numbers.
        assert_eq!(unsafe { cuMemMap(map_with_offset, 0, UNIT, UNIT, handle, 0) }, SUCCESS);
        assert_eq!(PASSED.swap(0, SeqCst), driver_handle(handle));
        assert!(refused_for("cuMemMap:"));
        call!(cuMemRelease(handle));
        assert_eq!(taint::obstacle(), None);

        let handles = [create(0), create(0), create(0)];
        let address = reserve(3 * UNIT);
        for (at, handle) in (address..).step_by(UNIT).zip(handles) {
            call!(cuMemMap(at, UNIT, 0, handle, 0));
            call!(cuMemRelease(handle));
        }
        let range = |start, bytes| {
            // SAFETY: numbers, and an out parameter that is not used.
            unsafe { cuMemGetHandleForAddressRange(give_range, std::ptr::null_mut(), start, bytes, 1, 0) }
        };
        // The last byte of the first, and the second.
        assert_eq!(range(address + UNIT as u64 - 1, UNIT), SUCCESS);
        assert!(refused_for("cuMemGetHandleForAddressRange"));
        call!(cuMemUnmap(address, UNIT));
        assert!(refused_for("cuMemGetHandleForAddressRange"));
        call!(cuMemUnmap(address + UNIT as u64, UNIT));
        assert_eq!(taint::obstacle(), None);
        // Memory that is not ours.
        assert_eq!(range(4096, 4096), SUCCESS);
        call!(cuMemUnmap(address + 2 * UNIT as u64, UNIT));
        assert!(refused_for("cuMemGetHandleForAddressRange"));
    });
}

/// The handles get as far as the driver, which does not support the calls; one that is gone does not.
#[test]
fn calls_that_take_handles_get_the_drivers() {
    alone("cuda::memory::vmm::tests::calls_that_take_handles_get_the_drivers", || {
        const UNSUPPORTED: CUresult = sys::CUresult::CUDA_ERROR_NOT_SUPPORTED as CUresult;
        let (alive, gone) = (create(0), create(0));
        call!(cuMemRelease(gone));
        let with = |handle, expected| {
            let mut info = array_info(handle);
            let results = [
                result!(cuMemMapArrayAsync(info.as_mut_ptr(), 1, std::ptr::null_mut())),
                result!(cuLogicalEndpointBindMem(0, 0, 0, handle, 0, UNIT as u64, 0)),
            ];
            assert_eq!(results, [expected; 2]);
        };
        with(alive, UNSUPPORTED);
        with(gone, INVALID_VALUE);
        assert_eq!(to_driver(77), Ok(77));
        assert_eq!(taint::obstacle(), None);
    });
}

/// A multicast object and the memory that is bound to it have handles of ours.
#[test]
fn multicast_objects_are_known_with_what_is_bound_to_them() {
    // The second versions came with CUDA 13.1.
    alone_under(
        "590",
        "cuda::memory::vmm::tests::multicast_objects_are_known_with_what_is_bound_to_them",
        || {
            let object = create_object(0);
            for device in [0, 1] {
                call!(cuMulticastAddDevice(object, device));
            }
            let (memory, gone) = (create(0), create(0));
            call!(cuMemRelease(gone));
            let id = id_of(memory).expect("one of ours");
            let bound = || registry().allocations[&id].bound;
            let address = reserve(UNIT);
            call!(cuMemMap(address, UNIT, 0, memory, 0));
            assert_eq!(result!(cuMulticastBindMem(object, 0, gone, 0, UNIT, 0)), INVALID_VALUE);
            assert_eq!(result!(cuMulticastBindMem(gone, 0, memory, 0, UNIT, 0)), INVALID_VALUE);
            assert_eq!(result!(cuMulticastBindMem(object, 0, memory, 0, UNIT, 1)), INVALID_VALUE);
            assert_eq!(bound(), 0);
            call!(cuMulticastBindMem(object, 0, memory, 0, UNIT, 0));
            assert_eq!(bound(), 1);
            assert_ne!(result!(cuMulticastUnbind(object, 0, UNIT, UNIT)), SUCCESS);
            assert_eq!(bound(), 1);
            call!(cuMulticastUnbind(object, 0, 0, UNIT));
            call!(cuMulticastBindMem_v2(object, 0, 0, memory, 0, UNIT, 0));
            call!(cuMulticastUnbind(object, 0, 0, UNIT));
            call!(cuMulticastBindAddr(object, 0, address, UNIT, 0));
            call!(cuMulticastUnbind(object, 0, 0, UNIT));
            call!(cuMulticastBindAddr_v2(object, 0, 0, address, UNIT, 0));
            // Bound memory lives without a handle and a mapping, until the object ends.
            call!(cuMemUnmap(address, UNIT));
            call!(cuMemRelease(memory));
            assert_eq!(bound(), 1);
            call!(cuMemRelease(object));
            assert!(registry().allocations.is_empty());
            assert_eq!(taint::obstacle(), None);
        },
    );
}

/// The driver would bind it, since the interposer asks for memory that can be exported.
#[test]
fn private_memory_is_not_bound_to_objects_that_others_may_get() {
    alone("cuda::memory::vmm::tests::private_memory_is_not_bound_to_objects_that_others_may_get", || {
        let object = create_object(POSIX_DESCRIPTOR.0.into());
        for device in [0, 1] {
            call!(cuMulticastAddDevice(object, device));
        }
        let private = create(0);
        assert_eq!(result!(cuMulticastBindMem(object, 0, private, 0, UNIT, 0)), INVALID_VALUE);
        let shared = create(POSIX_DESCRIPTOR.0);
        call!(cuMulticastBindMem(object, 0, shared, 0, UNIT, 0));
        call!(cuMulticastUnbind(object, 0, 0, UNIT));
        assert_eq!(taint::obstacle(), None);
    });
}

/// An object that did not come through a launcher cannot be brought back.
#[test]
fn an_object_of_unknown_origin_is_an_obstacle() {
    alone("cuda::memory::vmm::tests::an_object_of_unknown_origin_is_an_obstacle", || {
        let created = create_object(POSIX_DESCRIPTOR.0.into());
        let object = import(&export(created).unwrap());
        assert!(refused_for("cuMemExportToShareableHandle") || refused_for("cuMemImportFromShareableHandle"));
        call!(cuMulticastAddDevice(object, 0));
        assert!(refused_for("cuMulticastAddDevice"));
    });
}

fn create_object(handle_types: u64) -> CUmemGenericAllocationHandle {
    let properties = CUmulticastObjectProp { numDevices: 2, size: UNIT, handleTypes: handle_types, flags: 0 };
    let mut created = 0;
    call!(cuMulticastCreate(&raw mut created, &raw const properties));
    assert!(matches!(named(created), Named::MappedAllocation { .. }));
    created
}

/// Nonsense is answered by the driver, and nothing is noted.
#[test]
fn nonsense_changes_nothing() {
    alone("cuda::memory::vmm::tests::nonsense_changes_nothing", || {
        let handle = create(0);
        let properties = Properties::of(0);
        let mut other = 0;
        let wrong = Properties { handle_types: 1 << 20, ..properties };
        for (out, bytes, properties, flags) in [
            (std::ptr::null_mut(), UNIT, &raw const properties, 0),
            (&raw mut other, UNIT, null(), 0),
            (&raw mut other, UNIT, &raw const properties, 1),
            (&raw mut other, UNIT + 1, &raw const properties, 0),
            (&raw mut other, 0, &raw const properties, 0),
            (&raw mut other, UNIT, &raw const wrong, 0),
        ] {
            assert_eq!(result!(cuMemCreate(out, bytes, properties.cast(), flags)), INVALID_VALUE);
        }
        let address = reserve(UNIT);
        assert_eq!(result!(cuMemMap(address, UNIT, UNIT, handle, 0)), INVALID_VALUE);
        assert_eq!(result!(cuMemMap(address, UNIT, 0, handle, 1)), INVALID_VALUE);
        assert_ne!(result!(cuMemMap(address, 2 * UNIT, 0, handle, 0)), SUCCESS);
        assert_eq!(result!(cuMemMap(address, UNIT, 0, 77, 0)), INVALID_VALUE);
        call!(cuMemMap(address, UNIT, 0, handle, 0));
        assert_eq!(result!(cuMemUnmap(address, 2 * UNIT)), INVALID_VALUE);
        assert_eq!(result!(cuMemUnmap(address, 0)), INVALID_VALUE);
        assert_eq!(result!(cuMemUnmap(u64::MAX - 5, usize::MAX)), INVALID_VALUE);
        assert_eq!(result!(cuMemSetAccess(address, UNIT, null(), 1)), INVALID_VALUE);
        assert_eq!(
            result!(cuMemRetainAllocationHandle(std::ptr::null_mut(), address as *mut c_void)),
            INVALID_VALUE
        );
        let id = id_of(handle).expect("one of ours");
        let registry = registry();
        assert_eq!(registry.allocations.len(), 1);
        let allocation = &registry.allocations[&id];
        assert_eq!((allocation.references, allocation.mappings.len()), (1, 1));
        assert!(allocation.mappings[0].access.is_empty());
    });
}

/// One physical allocation that all threads map and retain, and physical allocations of each thread's own.
#[test]
fn threads_do_not_disturb_each_other() {
    alone("cuda::memory::vmm::tests::threads_do_not_disturb_each_other", || {
        const THREADS: usize = 4;
        let before = held();
        let shared = create(0);
        let base = reserve(2 * THREADS * UNIT);
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let at = base + (2 * thread * UNIT) as u64;
                scope.spawn(move || {
                    for _ in 0..300 {
                        let own = create(0);
                        call!(cuMemMap(at, UNIT, 0, shared, 0));
                        call!(cuMemMap(at + UNIT as u64, UNIT, 0, own, 0));
                        call!(cuMemRelease(own));
                        let mut again = 0;
                        call!(cuMemRetainAllocationHandle(&raw mut again, at as *mut c_void));
                        assert_eq!(again, shared);
                        let access = Access::of(0);
                        call!(cuMemSetAccess(at, 2 * UNIT, (&raw const access).cast(), 1));
                        call!(cuMemUnmap(at, 2 * UNIT));
                        call!(cuMemRelease(shared));
                    }
                });
            }
        });
        call!(cuMemRelease(shared));
        assert_eq!(held(), before);
        assert!(registry().allocations.is_empty());
    });
}
