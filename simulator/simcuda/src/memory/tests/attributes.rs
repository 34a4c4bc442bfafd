use std::ffi::c_void;

use super::vmm::{create_exportable, map, release, release_range, reserve, set_access, unmap};
use super::*;

const CONTEXT: u32 = 1;
const MEMORY_TYPE: u32 = 2;
const DEVICE_POINTER: u32 = 3;
const HOST_POINTER: u32 = 4;
const SYNC_MEMOPS: u32 = 6;
const BUFFER_ID: u32 = 7;
const IS_MANAGED: u32 = 8;
const DEVICE_ORDINAL: u32 = 9;
const IS_LEGACY_IPC: u32 = 10;
const RANGE_START: u32 = 11;
const RANGE_SIZE: u32 = 12;
const MAPPED: u32 = 13;
const HANDLE_TYPES: u32 = 14;
const ACCESS_FLAGS: u32 = 16;
const POOL: u32 = 17;
const MAPPING_SIZE: u32 = 18;
const MAPPING_BASE: u32 = 19;

fn get(attribute: u32, address: u64) -> Result<u64> {
    let mut value = 0_u64;
    // SAFETY: `value` is a local variable that is large enough for every attribute.
    unsafe { cuPointerGetAttribute((&raw mut value).cast(), attribute, address) }.map(|()| value)
}

#[test]
fn of_device_memory() {
    let context = context_on(1);
    let address = alloc(1000).unwrap();
    let inside = address + 10;
    let id = get(BUFFER_ID, inside).unwrap();
    for (attribute, expected) in [
        (CONTEXT, context.handle as u64),
        (MEMORY_TYPE, 2),
        (DEVICE_POINTER, inside),
        (IS_MANAGED, 0),
        (DEVICE_ORDINAL, 1),
        (IS_LEGACY_IPC, 1),
        (RANGE_START, address),
        (RANGE_SIZE, 1000),
        (MAPPED, 1),
        (HANDLE_TYPES, 0),
        (ACCESS_FLAGS, 3),
        (POOL, 0),
        (SYNC_MEMOPS, 0),
    ] {
        assert_eq!(get(attribute, inside), Ok(expected), "attribute {attribute}");
    }
    assert_eq!(get(HOST_POINTER, inside).map(|_| ()), INVALID);
    for unknown in [0, 22, 999] {
        assert_eq!(get(unknown, inside).map(|_| ()), INVALID);
    }
    let on = 1_u32;
    // SAFETY: `on` is a local variable.
    unsafe { cuPointerSetAttribute((&raw const on).cast(), SYNC_MEMOPS, inside) }.unwrap();
    assert_eq!(get(SYNC_MEMOPS, address), Ok(1));
    // SAFETY: as above.
    assert_eq!(unsafe { cuPointerSetAttribute((&raw const on).cast(), BUFFER_ID, inside) }, INVALID);
    free(address).unwrap();
    let again = alloc(1000).unwrap();
    assert_ne!(get(BUFFER_ID, again), Ok(id), "the same address, another allocation");
    free(again).unwrap();
}

#[test]
fn of_host_and_managed_memory() {
    let _context = context();
    let mut host: *mut c_void = std::ptr::null_mut();
    let mut managed = 0;
    // SAFETY: both are local variables.
    unsafe {
        cuMemAllocHost_v2(&raw mut host, 100).unwrap();
        cuMemAllocManaged(&raw mut managed, 100, 1).unwrap();
    }
    let start = host as u64;
    assert_eq!((get(MEMORY_TYPE, start), get(HOST_POINTER, start + 1)), (Ok(1), Ok(start + 1)));
    assert_eq!((get(MEMORY_TYPE, managed), get(IS_MANAGED, managed)), (Ok(2), Ok(1)));
    assert_eq!(get(HOST_POINTER, managed), Ok(managed));
    // SAFETY: the address is this test's.
    unsafe { cuMemFreeHost(host) }.unwrap();
    free(managed).unwrap();
}

#[test]
fn of_mapped_memory() {
    let _context = context();
    let base = reserve(4 * PAGE).unwrap();
    let handle = create_exportable(2 * PAGE).unwrap();
    map(base + PAGE, 2 * PAGE, handle).unwrap();
    let inside = base + 2 * PAGE + 1;
    assert_eq!(get(ACCESS_FLAGS, inside), Ok(0));
    set_access(base + PAGE, 2 * PAGE, 0, 1).unwrap();
    for (attribute, expected) in [
        (CONTEXT, 0),
        (MEMORY_TYPE, 2),
        (DEVICE_ORDINAL, 0),
        (IS_LEGACY_IPC, 0),
        (RANGE_START, base),
        (RANGE_SIZE, 4 * PAGE),
        (MAPPING_BASE, base + PAGE),
        (MAPPING_SIZE, 2 * PAGE),
        (MAPPED, 1),
        (HANDLE_TYPES, 1),
        (ACCESS_FLAGS, 1),
    ] {
        assert_eq!(get(attribute, inside), Ok(expected), "attribute {attribute}");
    }
    let on = 1_u32;
    // SAFETY: `on` is a local variable.
    let set = unsafe { cuPointerSetAttribute((&raw const on).cast(), SYNC_MEMOPS, inside) };
    assert_eq!(set, Err(CUresult::CUDA_ERROR_NOT_SUPPORTED));
    assert_eq!((get(MAPPED, base), get(RANGE_SIZE, base)), (Ok(0), Ok(4 * PAGE)));
    assert_eq!(get(MEMORY_TYPE, base).map(|_| ()), INVALID);
    unmap(base + PAGE, 2 * PAGE).unwrap();
    release(handle).unwrap();
    release_range(base, 4 * PAGE).unwrap();
}

#[test]
fn of_an_address_that_is_nothing() {
    let _context = context();
    let local = 0_u64;
    let address = &raw const local as u64;
    assert_eq!(get(MEMORY_TYPE, address).map(|_| ()), INVALID);
    let (mut kind, mut start, mut ordinal) = (77_u32, 77_u64, 77_u32);
    let mut attributes = [MEMORY_TYPE, RANGE_START, DEVICE_ORDINAL];
    let mut data: [*mut c_void; 3] =
        [(&raw mut kind).cast(), (&raw mut start).cast(), (&raw mut ordinal).cast()];
    // SAFETY: the arrays are as long as is said, each pointer is to a variable of the attribute's size.
    unsafe { cuPointerGetAttributes(3, attributes.as_mut_ptr(), data.as_mut_ptr(), address) }.unwrap();
    assert_eq!((kind, start, ordinal), (0, 0, 0));
    let device = alloc(100).unwrap();
    // SAFETY: as above.
    unsafe { cuPointerGetAttributes(3, attributes.as_mut_ptr(), data.as_mut_ptr(), device) }.unwrap();
    assert_eq!((kind, start, ordinal), (2, device, 0));
    attributes[0] = 1000;
    // SAFETY: as above.
    let unknown = unsafe { cuPointerGetAttributes(3, attributes.as_mut_ptr(), data.as_mut_ptr(), device) };
    assert_eq!(unknown, INVALID);
    free(device).unwrap();
}
