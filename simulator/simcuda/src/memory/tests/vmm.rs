use std::ffi::c_void;
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd};

use cuda_abi::layout::{self, Properties};
use cuda_abi::sys;
use cuda_abi::types::CUmemLocation;

use super::*;

pub(super) fn reserve(size_bytes: u64) -> Result<u64> {
    reserve_at(size_bytes, 0, 0)
}

fn reserve_at(size_bytes: u64, align: usize, hint: u64) -> Result<u64> {
    let mut address = 0;
    // SAFETY: `address` is a local variable.
    unsafe { cuMemAddressReserve(&raw mut address, size_bytes as usize, align, hint, 0) }.map(|()| address)
}

pub(super) fn release_range(address: u64, size_bytes: u64) -> Result {
    // SAFETY: an address is only looked up.
    unsafe { cuMemAddressFree(address, size_bytes as usize) }
}

fn properties(handle_types: u32) -> Properties {
    Properties { handle_types, ..Properties::of(0) }
}

fn create_with(size_bytes: u64, properties: &Properties) -> Result<u64> {
    let mut handle = 0;
    let properties = (&raw const *properties).cast::<sys::CUmemAllocationProp>();
    // SAFETY: all are local variables, of the layout that the call expects.
    unsafe { cuMemCreate(&raw mut handle, size_bytes as usize, properties, 0) }.map(|()| handle)
}

pub(super) fn create(size_bytes: u64) -> Result<u64> {
    create_with(size_bytes, &properties(0))
}

pub(super) fn create_exportable(size_bytes: u64) -> Result<u64> {
    create_with(size_bytes, &properties(1))
}

/// Memory of the host's NUMA node.
pub(super) fn create_on_node(size_bytes: u64) -> Result<u64> {
    create_with(size_bytes, &Properties { location: NODE, ..properties(0) })
}

const NODE: CUmemLocation = CUmemLocation { type_: 3, id: 0 };

/// Lets the host read and write.
pub(super) fn allow_host(address: u64, size_bytes: u64) -> Result {
    let description = layout::Access { location: NODE, flags: 3 };
    let description = (&raw const description).cast::<sys::CUmemAccessDesc>();
    // SAFETY: one description, a local variable.
    unsafe { cuMemSetAccess(address, size_bytes as usize, description, 1) }
}

pub(super) fn release(handle: u64) -> Result {
    // SAFETY: a handle is only looked up.
    unsafe { cuMemRelease(handle) }
}

pub(super) fn map(address: u64, size_bytes: u64, handle: u64) -> Result {
    // SAFETY: an address is only looked up.
    unsafe { cuMemMap(address, size_bytes as usize, 0, handle, 0) }
}

pub(super) fn unmap(address: u64, size_bytes: u64) -> Result {
    // SAFETY: an address is only looked up.
    unsafe { cuMemUnmap(address, size_bytes as usize) }
}

pub(super) fn set_access(address: u64, size_bytes: u64, device: i32, flags: u32) -> Result {
    let description = layout::Access { location: CUmemLocation::of(device), flags };
    let description = (&raw const description).cast::<sys::CUmemAccessDesc>();
    // SAFETY: one description, a local variable.
    unsafe { cuMemSetAccess(address, size_bytes as usize, description, 1) }
}

fn get_access(address: u64, device: i32) -> Result<u64> {
    let mut flags = 0;
    let location = CUmemLocation::of(device);
    let location = &raw const location;
    // SAFETY: all are local variables.
    unsafe { cuMemGetAccess(&raw mut flags, location, address) }.map(|()| flags)
}

pub(super) fn retain(address: u64) -> Result<u64> {
    let mut handle = 0;
    // SAFETY: `handle` is a local variable.
    unsafe { cuMemRetainAllocationHandle(&raw mut handle, address as *mut c_void) }.map(|()| handle)
}

pub(super) fn export(handle: u64) -> Result<File> {
    let mut descriptor = -1_i32;
    let kind = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    // SAFETY: `descriptor` is a local variable.
    unsafe { cuMemExportToShareableHandle((&raw mut descriptor).cast(), handle, kind, 0) }?;
    // SAFETY: the call has opened it for this caller.
    Ok(unsafe { File::from_raw_fd(descriptor) })
}

pub(super) fn import(descriptor: i32) -> Result<u64> {
    let mut handle = 0;
    let kind = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    let descriptor = descriptor as usize as *mut c_void;
    // SAFETY: `handle` is a local variable; a descriptor is only looked up.
    unsafe { cuMemImportFromShareableHandle(&raw mut handle, descriptor, kind) }.map(|()| handle)
}

#[test]
fn granularity_is_two_mebibytes() {
    let _context = context();
    let get = |properties: &Properties, option| {
        let mut granularity = 0;
        let properties = (&raw const *properties).cast();
        // SAFETY: all are local variables.
        unsafe { cuMemGetAllocationGranularity(&raw mut granularity, properties, option) }
            .map(|()| granularity)
    };
    assert_eq!(get(&properties(0), 0), Ok(2 * MIB));
    assert_eq!(get(&properties(1), 1), Ok(2 * MIB));
    assert_eq!(get(&properties(0), 2).map(|_| ()), INVALID);
    let elsewhere = Properties { location: CUmemLocation::of(2), ..properties(0) };
    assert_eq!(get(&elsewhere, 0), Err(CUresult::CUDA_ERROR_INVALID_DEVICE));
}

#[test]
fn properties_are_checked() {
    let _context = context();
    let with = |change: fn(&mut Properties)| {
        let mut properties = properties(0);
        change(&mut properties);
        create_with(PAGE, &properties).map(|handle| release(handle).unwrap())
    };
    let unsupported = Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
    assert_eq!(with(|_| ()), Ok(()));
    assert_eq!(with(|properties| properties.kind = 0), INVALID);
    assert_eq!(with(|properties| properties.kind = 77), INVALID);
    assert_eq!(with(|properties| properties.handle_types = 16), INVALID);
    assert_eq!(with(|properties| properties.handle_types = 8), unsupported);
    assert_eq!(with(|properties| properties.location.type_ = 0), INVALID);
    assert_eq!(with(|properties| properties.location.type_ = 2), Ok(()));
    assert_eq!(with(|properties| (properties.location.type_, properties.handle_types) = (2, 1)), INVALID);
    assert_eq!(with(|properties| properties.location.type_ = 3), Ok(()));
    assert_eq!(with(|properties| properties.location = CUmemLocation { type_: 3, id: 1 }), INVALID);
    assert_eq!(with(|properties| properties.location.type_ = 4), INVALID);
    assert_eq!(with(|properties| properties.location.type_ = 5), unsupported);
    assert_eq!(with(|properties| properties.location.type_ = 1000), INVALID);
    assert_eq!(with(|properties| properties.location.id = -1), Err(CUresult::CUDA_ERROR_INVALID_DEVICE));
    assert_eq!(create(0).map(|_| ()), INVALID);
    assert_eq!(create(PAGE - 1).map(|_| ()), INVALID);
    assert_eq!(create(1 << 40), Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY));
    let handle = create_exportable(PAGE).unwrap();
    let mut answer = properties(0);
    // SAFETY: `answer` is a local variable of the layout that the call expects.
    unsafe { cuMemGetAllocationPropertiesFromHandle((&raw mut answer).cast(), handle) }.unwrap();
    assert_eq!((answer.kind, answer.handle_types, answer.location.id), (1, 1, 0));
    release(handle).unwrap();
}

#[test]
fn a_hint_is_honoured_only_where_the_addresses_are_free() {
    let _context = context();
    let first = reserve(4 * PAGE).unwrap();
    let elsewhere = reserve_at(PAGE, 0, first).unwrap();
    assert!(elsewhere < first || elsewhere >= first + 4 * PAGE);
    release_range(elsewhere, PAGE).unwrap();
    // Far from where the kernel places mappings of its own choice, so that no other thread takes it.
    let hint = 0x2000_0000_0000;
    let honoured = reserve_at(PAGE, 0, hint).unwrap();
    assert_eq!(honoured, hint);
    release_range(honoured, PAGE).unwrap();
    let aligned = reserve_at(PAGE, 64 * MIB, 0).unwrap();
    assert_eq!(aligned % (64 << 20), 0);
    release_range(aligned, PAGE).unwrap();
    assert_eq!(reserve_at(PAGE, 3 * MIB, 0).map(|_| ()), INVALID);
    assert_eq!(release_range(first, 3 * PAGE), INVALID);
    assert_eq!(release_range(first + PAGE, 3 * PAGE), INVALID);
    release_range(first, 4 * PAGE).unwrap();
}

#[test]
fn mapped_memory_needs_access() {
    let _context = context();
    let base = reserve(2 * PAGE).unwrap();
    let handle = create(PAGE).unwrap();
    map(base, PAGE, handle).unwrap();
    assert!(span(base, 0).is_none() && !is_accessible(base, 1, 0));
    assert_eq!(get_access(base, 0), Ok(0));
    for flags in [2, 4, 7] {
        assert_eq!(set_access(base, PAGE, 0, flags), INVALID);
    }
    assert_eq!(set_access(base, PAGE, 9, 3), Err(CUresult::CUDA_ERROR_INVALID_DEVICE));
    assert_eq!(set_access(base, 2 * PAGE, 0, 3), INVALID, "the second page is not mapped");
    set_access(base, PAGE, 0, 1).unwrap();
    assert!(!span(base, 0).unwrap().writable);
    set_access(base, PAGE, 1, 3).unwrap();
    poke(base + 5, 1, 42);
    assert_eq!(peek(base + 5, 0), 42);
    assert_eq!((get_access(base, 0), get_access(base, 1)), (Ok(1), Ok(3)));
    set_access(base, PAGE, 0, 0).unwrap();
    assert!(span(base, 0).is_none());
    assert_eq!(release_range(base, 2 * PAGE), INVALID, "something is mapped");
    unmap(base, PAGE).unwrap();
    assert_eq!(set_access(base, PAGE, 0, 3), INVALID);
    assert_eq!(get_access(base, 0).map(|_| ()), INVALID);
    release(handle).unwrap();
    release_range(base, 2 * PAGE).unwrap();
}

#[test]
fn one_memory_at_two_addresses() {
    let _context = context();
    let base = reserve(2 * PAGE).unwrap();
    let handle = create(PAGE).unwrap();
    map(base, PAGE, handle).unwrap();
    map(base + PAGE, PAGE, handle).unwrap();
    set_access(base, 2 * PAGE, 0, 3).unwrap();
    poke(base + 100, 0, 1);
    assert_eq!(peek(base + PAGE + 100, 0), 1);
    assert!(is_accessible(base + PAGE - 8, 16, 0), "a copy may cross from one mapping to the next");
    release(handle).unwrap();
    // The handle lives again while the memory is mapped.
    assert_eq!(retain(base + 1), Ok(handle));
    unmap(base, 2 * PAGE).unwrap();
    assert_eq!(retain(base).map(|_| ()), INVALID);
    map(base, PAGE, handle).unwrap();
    set_access(base, PAGE, 0, 3).unwrap();
    assert_eq!(peek(base + 100, 0), 1);
    unmap(base, PAGE).unwrap();
    release(handle).unwrap();
    release_range(base, 2 * PAGE).unwrap();
}

#[test]
fn the_range_is_the_reservation_and_the_address_range_is_the_mapping() {
    let _context = context();
    let base = reserve(4 * PAGE).unwrap();
    let handle = create(2 * PAGE).unwrap();
    map(base + PAGE, 2 * PAGE, handle).unwrap();
    let (mut start, mut size) = (0, 0);
    // SAFETY: both are local variables.
    unsafe { cuMemGetAddressRange_v2(&raw mut start, &raw mut size, base + 2 * PAGE + 5) }.unwrap();
    assert_eq!((start, size as u64), (base + PAGE, 2 * PAGE));
    // SAFETY: as above.
    let unmapped = unsafe { cuMemGetAddressRange_v2(&raw mut start, &raw mut size, base) };
    assert_eq!(unmapped, Err(CUresult::CUDA_ERROR_NOT_FOUND));
    assert_eq!(free(base + PAGE), INVALID);
    unmap(base + PAGE, 2 * PAGE).unwrap();
    release(handle).unwrap();
    release_range(base, 4 * PAGE).unwrap();
}

#[test]
fn an_import_outlives_the_exporter_s_handle() {
    let _context = context();
    let base = reserve(PAGE).unwrap();
    let plain = create(PAGE).unwrap();
    assert_eq!(export(plain).map(|_| ()), INVALID, "not created for it");
    release(plain).unwrap();
    let handle = create_exportable(PAGE).unwrap();
    map(base, PAGE, handle).unwrap();
    set_access(base, PAGE, 0, 3).unwrap();
    poke(base, 0, 0x5a);
    let descriptor = export(handle).unwrap();
    unmap(base, PAGE).unwrap();
    release(handle).unwrap();
    // Only the descriptor holds the memory now.
    let imported = import(descriptor.as_raw_fd()).unwrap();
    drop(descriptor);
    map(base, PAGE, imported).unwrap();
    set_access(base, PAGE, 0, 1).unwrap();
    assert_eq!(peek(base, 0), 0x5a);
    assert_eq!(export(imported).map(|_| ()), INVALID, "it was imported");
    unmap(base, PAGE).unwrap();
    release(imported).unwrap();
    release_range(base, PAGE).unwrap();
}

#[test]
fn a_descriptor_of_something_else_is_refused() {
    let _context = context();
    let null = File::open("/dev/null").unwrap();
    assert_eq!(import(null.as_raw_fd()).map(|_| ()), INVALID);
    assert_eq!(import(-1).map(|_| ()), INVALID);
    assert_eq!(import(1_000_000).map(|_| ()), INVALID);
    let handle = create_exportable(PAGE).unwrap();
    let mut segment = export(handle).unwrap();
    // The same bytes, trailer and all, in a file that is no segment of the device.
    let mut copy = tempfile::tempfile().unwrap();
    std::io::copy(&mut segment, &mut copy).unwrap();
    assert_eq!(import(copy.as_raw_fd()).map(|_| ()), INVALID);
    let again = import(segment.as_raw_fd()).unwrap();
    release(again).unwrap();
    release(handle).unwrap();
}
