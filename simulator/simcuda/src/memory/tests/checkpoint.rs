//! Memory is detached from the devices and attached again.

use std::ffi::c_void;
use std::os::fd::AsRawFd;

use super::vmm::{
    allow_host, create, create_exportable, create_on_node, export, import, map, release, reserve, set_access,
    unmap,
};
use super::*;
use crate::memory::ledger;

fn used_bytes() -> u64 {
    ledger::device(0).unwrap().used_bytes().unwrap()
}

/// Whether the host has nothing mapped at the address.
fn is_unmapped(address: u64) -> bool {
    let mut residency = [0];
    let page = (address & !4095) as *mut c_void;
    // SAFETY: mincore reads nothing of the range, and writes a byte for its only page.
    let result = unsafe { libc::mincore(page, 1, residency.as_mut_ptr()) };
    result != 0 && std::io::Error::last_os_error().raw_os_error() == Some(libc::ENOMEM)
}

/// Maps a page of host memory at an address, over what is there.
fn map_other_memory_at(address: u64) {
    // SAFETY: nothing uses the range, and no other code in this process maps at addresses of its own choice.
    let mapped = unsafe {
        libc::mmap(
            address as *mut c_void,
            4096,
            libc::PROT_READ,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED,
            -1,
            0,
        )
    };
    assert_eq!(mapped as u64, address);
}

fn open_files() -> Vec<String> {
    let entries = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let targets = entries.filter_map(|entry| std::fs::read_link(entry.path()).ok());
    targets.map(|target| target.display().to_string()).filter(|target| target.contains("/device")).collect()
}

#[test]
fn contents_and_addresses_come_back() {
    if !is_own_process("memory::tests::checkpoint::contents_and_addresses_come_back", &[]) {
        return;
    }
    let context = context();
    let small = alloc(100).unwrap();
    let large = alloc(5 * MIB).unwrap();
    let variable = allocate_internal(&context, 100, 16).unwrap();
    let range = reserve(2 * PAGE).unwrap();
    let handle = create_exportable(PAGE).unwrap();
    let unmapped = create(PAGE).unwrap();
    let descriptor = export(handle).unwrap();
    map(range, PAGE, handle).unwrap();
    set_access(range, PAGE, 0, 3).unwrap();
    let mut host: *mut c_void = std::ptr::null_mut();
    // SAFETY: `host` is a local variable.
    unsafe { cuMemAllocHost_v2(&raw mut host, 100) }.unwrap();
    let mut of_pool = 0;
    // SAFETY: `of_pool` is a local variable.
    unsafe { cuMemAllocAsync(&raw mut of_pool, 1000, std::ptr::null_mut()) }.unwrap();
    crate::stream::synchronize_context(&context).unwrap();
    let places = [small + 99, large, large + (5 << 20) - 1, variable, range + 77, of_pool];
    for (value, address) in (1..).zip(places) {
        poke(address, 0, value);
    }
    let used = used_bytes();
    drop(descriptor);

    assert_eq!(detach(), Ok(None));
    assert_eq!(used_bytes(), 0);
    assert_eq!(open_files(), Vec::<String>::new());
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    assert!(!maps.contains("/segment-") && !maps.contains("/ledger"));
    for address in [small, large, variable, range, range + PAGE, of_pool] {
        assert!(!is_unmapped(address), "there is a placeholder");
    }
    assert!(span(small, 0).is_none());
    assert!(!is_unmapped(host as u64));
    // The hazard: memory that is mapped into the driver's ranges is lost.
    map_other_memory_at(range);

    assert_eq!(attach(), Ok(()));
    assert_eq!(used_bytes(), used);
    for (value, address) in (1..).zip(places) {
        assert_eq!(peek(address, 0), value);
        assert!(!is_unmapped(address));
    }
    assert_eq!(peek(large + 1, 0), 0);
    unmap(range, PAGE).unwrap();
    release(handle).unwrap();
    map(range, PAGE, unmapped).unwrap();
    set_access(range, PAGE, 0, 3).unwrap();
    poke(range, 0, 1);
    free(small).unwrap();
    free(large).unwrap();
    free(of_pool).unwrap();
    assert!(alloc(100).is_ok());
}

#[test]
fn the_host_sees_its_memory_again_after_a_restore() {
    if !is_own_process("memory::tests::checkpoint::the_host_sees_its_memory_again_after_a_restore", &[]) {
        return;
    }
    let _context = context();
    let (range, handle) = (reserve(2 * PAGE).unwrap(), create_on_node(PAGE).unwrap());
    map(range, PAGE, handle).unwrap();
    set_access(range, PAGE, 0, 3).unwrap();
    allow_host(range, PAGE).unwrap();
    let word = range as *mut u32;
    // SAFETY: the range is mapped for the host, and no other thread uses it.
    unsafe { word.write(77) };
    assert_eq!(peek(range, 0), 77);
    // The process would be lost here.
    assert_eq!(detach(), Ok(Some(CUresult::CUDA_ERROR_UNKNOWN)));
    assert!(!is_unmapped(range));
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    assert!(!maps.contains("/segment-"));
    assert_eq!(attach(), Ok(()));
    // SAFETY: as above.
    assert_eq!(unsafe { word.read() }, 77);
    poke(range, 0, 78);
    // SAFETY: as above.
    assert_eq!(unsafe { word.read() }, 78);
    unmap(range, PAGE).unwrap();
    release(handle).unwrap();
    assert_eq!(ledger::memory(layout::Location::Host).unwrap().used_bytes(), Ok(0));
}

#[test]
fn a_restore_needs_enough_free_memory() {
    if !is_own_process("memory::tests::checkpoint::a_restore_needs_enough_free_memory", &[]) {
        return;
    }
    let _context = context();
    let address = alloc(600 * MIB).unwrap();
    poke(address, 0, 1);
    detach().unwrap();
    // Another process takes the memory meanwhile.
    let (_, taken) = ledger::device(0).unwrap().create(500 << 20, 0).unwrap();
    assert_eq!(attach(), Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY));
    drop(taken);
}

#[test]
fn what_cannot_be_taken_away_stops_it() {
    if !is_own_process("memory::tests::checkpoint::what_cannot_be_taken_away_stops_it", &[]) {
        return;
    }
    let refused = Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
    let _context = context();
    let address = alloc(100).unwrap();
    poke(address, 0, 1);
    let mut managed = 0;
    // SAFETY: `managed` is a local variable.
    unsafe { cuMemAllocManaged(&raw mut managed, 100, 1) }.unwrap();
    assert_eq!(detach(), refused);
    assert_eq!(peek(address, 0), 1);
    free(managed).unwrap();

    let handle = create_exportable(PAGE).unwrap();
    let descriptor = export(handle).unwrap();
    let imported = import(descriptor.as_raw_fd()).unwrap();
    assert_eq!(detach(), refused);
    release(imported).unwrap();

    let exported = alloc(100).unwrap();
    let mut ipc = cuda_abi::sys::CUipcMemHandle { reserved: [0; 64] };
    // SAFETY: `ipc` is a local variable.
    unsafe { cuIpcGetMemHandle(&raw mut ipc, exported) }.unwrap();
    assert_eq!(detach(), Ok(Some(CUresult::CUDA_ERROR_INVALID_VALUE)), "the restore fails");
    assert_eq!(attach(), Ok(()));
    free(exported).unwrap();

    assert_eq!(detach(), Ok(None));
    assert_eq!(attach(), Ok(()));
    assert_eq!(peek(address, 0), 1);
}
