use std::ffi::c_void;

use super::*;
use crate::context::{self, cuCtxDestroy_v2, cuCtxPopCurrent_v2, cuCtxSetCurrent};

#[test]
fn small_allocations_share_a_page_and_large_ones_have_their_own() {
    let _context = context();
    let (a, b) = (alloc(100).unwrap(), alloc(100).unwrap());
    assert_eq!(a % 512, 0);
    assert_eq!(b - a, 512);
    let large = alloc(3 * MIB).unwrap();
    assert_eq!(large % PAGE, 0);
    assert_eq!(span(large, 0).unwrap().len, 2 * PAGE);
    assert!(is_accessible(a, 100, 0) && is_accessible(a + 99, 1, 0));
    assert!(!is_accessible(a, 101, 0));
    assert!(!is_accessible(a, u64::MAX, 0));
    assert!(!is_accessible(a, 100, 1));
    assert_eq!(device_of(a + 99), Some(0));
    for address in [a, b, large] {
        assert_eq!(free(address + 1), INVALID);
        assert_eq!(free(address), Ok(()));
        assert_eq!(free(address), INVALID);
    }
    assert!(span(a, 0).is_none() && span(large, 0).is_none());
    assert_eq!(device_of(a), None);
}

#[test]
fn arguments_are_checked() {
    let _context = context();
    assert_eq!(alloc(0), Err(CUresult::CUDA_ERROR_INVALID_VALUE));
    // SAFETY: NULL is refused.
    assert_eq!(unsafe { cuMemAlloc_v2(std::ptr::null_mut(), 1) }, INVALID);
    assert_eq!(alloc(4 << 30), Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY));
    assert_eq!(alloc(usize::MAX), Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY));
    assert_eq!(free(0), Ok(()));
    let local = 0_u32;
    assert_eq!(free(&raw const local as u64), INVALID);
    // SAFETY: NULL for a pointer that is not wanted.
    assert_eq!(unsafe { cuCtxSetCurrent(std::ptr::null_mut()) }, Ok(()));
    assert_eq!(alloc(1), Err(CUresult::CUDA_ERROR_INVALID_CONTEXT));
    assert_eq!(free(0), Err(CUresult::CUDA_ERROR_INVALID_CONTEXT));
}

#[test]
fn pitch() {
    let _context = context();
    let (mut address, mut pitch) = (0, 0);
    let mut allocate = |width, height, element| {
        // SAFETY: both are local variables.
        unsafe { cuMemAllocPitch_v2(&raw mut address, &raw mut pitch, width, height, element) }
    };
    for (width, height, element) in [(0, 1, 4), (1, 0, 4), (1, 1, 3), (1, 1, 32)] {
        assert_eq!(allocate(width, height, element), INVALID);
    }
    assert_eq!(allocate(usize::MAX - 600, 3, 4), Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY));
    assert_eq!(allocate(513, 7, 4), Ok(()));
    assert_eq!(pitch, 1024);
    assert!(is_accessible(address, 7 * 1024, 0) && !is_accessible(address, 7 * 1024 + 1, 0));
    free(address).unwrap();
}

#[test]
fn address_range() {
    let _context = context();
    let address = alloc(1000).unwrap();
    let (mut base, mut size) = (0, 0);
    // SAFETY: both are local variables, and NULL is allowed for each.
    unsafe {
        cuMemGetAddressRange_v2(&raw mut base, &raw mut size, address + 999).unwrap();
        cuMemGetAddressRange_v2(std::ptr::null_mut(), std::ptr::null_mut(), address).unwrap();
    }
    assert_eq!((base, size), (address, 1000));
    // SAFETY: as above.
    let beyond = unsafe { cuMemGetAddressRange_v2(&raw mut base, &raw mut size, address + 1000) };
    assert_eq!(beyond, Err(CUresult::CUDA_ERROR_NOT_FOUND));
    free(address).unwrap();
}

#[test]
fn a_device_address_cannot_be_touched_by_the_host() {
    let _context = context();
    let address = alloc(4096).unwrap();
    poke(address, 0, 7);
    let mut pipe = [0; 2];
    // SAFETY: the array has room for two descriptors.
    assert_eq!(unsafe { libc::pipe(pipe.as_mut_ptr()) }, 0);
    // The kernel refuses to read from there for us, where a load would crash.
    // SAFETY: write only reads the memory.
    assert_eq!(unsafe { libc::write(pipe[1], address as *const c_void, 1) }, -1);
    assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EFAULT));
    for descriptor in pipe {
        // SAFETY: the descriptors are this test's.
        unsafe { libc::close(descriptor) };
    }
    free(address).unwrap();
}

#[test]
fn a_module_s_variables_are_zeroed_and_not_the_program_s() {
    let context = context();
    let dirty = alloc(4096).unwrap();
    (0..4096).for_each(|at| poke(dirty + at, 0, 0xff));
    free(dirty).unwrap();
    let address = allocate_internal(&context, 4096, 16).unwrap();
    assert!((0..4096).all(|at| peek(address + at, 0) == 0));
    assert_eq!(free(address), INVALID);
    let aligned = allocate_internal(&context, 10, 4096).unwrap();
    assert_eq!(aligned % 4096, 0);
    assert_eq!(allocate_internal(&context, 10, 48), Err(CUresult::CUDA_ERROR_INVALID_VALUE));
    free_internal(address);
    free_internal(aligned);
    assert!(span(aligned, 0).is_none());
}

#[test]
fn memory_goes_with_its_context() {
    let mine = context();
    let kept = alloc(100).unwrap();
    let other = context();
    let small = alloc(100).unwrap();
    let large = alloc(3 * MIB).unwrap();
    let internal = allocate_internal(&other, 100, 1).unwrap();
    let mut host: *mut c_void = std::ptr::null_mut();
    // SAFETY: `host` is a local variable.
    unsafe { cuMemAllocHost_v2(&raw mut host, 100) }.unwrap();
    // SAFETY: the handle is a live context's.
    unsafe { cuCtxDestroy_v2(other.handle as _) }.unwrap();
    assert_eq!(context::current().unwrap().handle, mine.handle);
    for address in [small, large, internal] {
        assert!(span(address, 0).is_none());
        assert_eq!(free(address), INVALID);
    }
    assert!(!is_pinned(host as u64, 1));
    assert!(is_accessible(kept, 100, 0));
    free(kept).unwrap();
}

#[test]
fn memory_of_another_context_can_be_freed() {
    let _first = context();
    let address = alloc(100).unwrap();
    let _second = context();
    assert_eq!(free(address), Ok(()));
    let mut popped = std::ptr::null_mut();
    // SAFETY: `popped` is a local variable.
    unsafe { cuCtxPopCurrent_v2(&raw mut popped) }.unwrap();
    assert_eq!(free(address), INVALID);
}

#[test]
fn host_memory() {
    let _context = context_on(1);
    let mut address: *mut c_void = std::ptr::null_mut();
    // SAFETY: `address` is a local variable.
    unsafe { cuMemHostAlloc(&raw mut address, 5000, 4) }.unwrap();
    let start = address as u64;
    assert!(is_pinned(start, 5000) && !is_pinned(start, 5001));
    assert!(is_accessible(start, 5000, 0));
    assert_eq!(span(start + 10, 0).unwrap().host as u64, start);
    assert_eq!(device_of(start), None);
    let mut device = 0;
    let mut flags = 0;
    // SAFETY: the out parameters are local variables, and addresses are only looked up.
    unsafe {
        cuMemHostGetDevicePointer_v2(&raw mut device, address.add(8), 0).unwrap();
        cuMemHostGetFlags(&raw mut flags, address).unwrap();
        assert_eq!(cuMemHostGetDevicePointer_v2(&raw mut device, address, 1), INVALID);
        assert_eq!(cuMemHostUnregister(address), Err(CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED));
        assert_eq!(cuMemHostAlloc(&raw mut address, 0, 0), INVALID);
        assert_eq!(cuMemHostAlloc(&raw mut address, 1, 8), INVALID);
        assert_eq!(cuMemFreeHost(address.add(1)), INVALID);
        assert_eq!(cuMemFreeHost(std::ptr::null_mut()), INVALID);
        assert_eq!(free(start), INVALID);
        cuMemFreeHost(address).unwrap();
        assert_eq!(cuMemFreeHost(address), INVALID);
    }
    assert_eq!(device, start + 8);
    assert_eq!(flags, 7);
    assert!(!is_pinned(start, 1));
}

#[test]
fn registered_memory() {
    let _context = context();
    let mut buffer = vec![0_u8; 10_000];
    let address: *mut c_void = buffer.as_mut_ptr().cast();
    // SAFETY: the range is this test's, and is registered for as long as it lives.
    unsafe {
        assert_eq!(cuMemHostRegister_v2(address, 0, 0), INVALID);
        assert_eq!(cuMemHostRegister_v2(address, 10, 16), INVALID);
        assert_eq!(cuMemHostRegister_v2(address, 10, 4), Err(CUresult::CUDA_ERROR_NOT_SUPPORTED));
        assert_eq!(cuMemHostRegister_v2(PAGE as *mut c_void, 10, 0), INVALID, "nothing is mapped there");
        cuMemHostRegister_v2(address, 10_000, 0).unwrap();
        let again = Err(CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
        assert_eq!(cuMemHostRegister_v2(address, 10_000, 0), again);
        assert_eq!(cuMemHostRegister_v2(address.add(9_999), 1, 0), again);
        assert_eq!(cuMemFreeHost(address), INVALID);
        assert!(is_pinned(address as u64 + 5, 9_995));
        let unknown = Err(CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
        assert_eq!(cuMemHostUnregister(address.add(1)), unknown);
        cuMemHostUnregister(address).unwrap();
        assert_eq!(cuMemHostUnregister(address), unknown);
    }
    let device = alloc(100).unwrap();
    // SAFETY: the call only inspects the range.
    assert_eq!(unsafe { cuMemHostRegister_v2(device as *mut c_void, 100, 0) }, INVALID);
    free(device).unwrap();
}

#[test]
fn managed_memory() {
    let _context = context();
    let mut address = 0;
    // SAFETY: the out parameters are local variables.
    unsafe {
        for flags in [0, 3, 4] {
            assert_eq!(cuMemAllocManaged(&raw mut address, 100, flags), INVALID);
        }
        cuMemAllocManaged(&raw mut address, 100, 1).unwrap();
    }
    // SAFETY: managed memory is the host's too.
    unsafe { (address as *mut u8).write(9) };
    assert_eq!(peek(address, 1), 9);
    let mut mostly = 0_i32;
    let mut by = [0_i32; 4];
    let null = std::ptr::null_mut();
    // SAFETY: the out parameters are local variables of the given sizes.
    unsafe {
        assert_eq!(cuMemAdvise(address, 101, 1, 0), INVALID);
        assert_eq!(cuMemAdvise(address, 100, 9, 0), INVALID);
        assert_eq!(cuMemAdvise(address, 100, 5, 2), Err(CUresult::CUDA_ERROR_INVALID_DEVICE));
        cuMemAdvise(address, 100, 1, 77).unwrap();
        cuMemAdvise(address, 100, 5, 1).unwrap();
        cuMemAdvise(address, 100, 5, -1).unwrap();
        cuMemRangeGetAttribute((&raw mut mostly).cast(), 4, 1, address, 100).unwrap();
        cuMemRangeGetAttribute(by.as_mut_ptr().cast(), 16, 3, address, 100).unwrap();
        assert_eq!(cuMemRangeGetAttribute((&raw mut mostly).cast(), 3, 1, address, 100), INVALID);
        assert_eq!(cuMemPrefetchAsync(address + 1, 100, 0, null), INVALID);
        cuMemPrefetchAsync(address, 100, 1, null).unwrap();
    }
    assert_eq!((mostly, by), (1, [-1, 1, -2, -2]));
    let mut last = 0_i32;
    // SAFETY: as above.
    unsafe { cuMemRangeGetAttribute((&raw mut last).cast(), 4, 4, address, 100) }.unwrap();
    assert_eq!(last, 1);
    assert_eq!(free(address), Ok(()));
    assert_eq!(free(address), INVALID);
    let device = alloc(100).unwrap();
    // SAFETY: an address is only looked up.
    assert_eq!(unsafe { cuMemAdvise(device, 100, 1, 0) }, INVALID);
    free(device).unwrap();
}

#[test]
fn peers() {
    let first = context();
    let second = context_on(1);
    let address = alloc(100).unwrap();
    assert!(!is_accessible(address, 100, 0) && span(address, 0).is_none());
    let (to_first, to_second) = (first.handle as _, second.handle as _);
    // SAFETY: the handles are of live contexts, or refused.
    unsafe {
        assert_eq!(cuCtxEnablePeerAccess(to_second, 0), Err(CUresult::CUDA_ERROR_INVALID_CONTEXT));
        cuCtxSetCurrent(to_first).unwrap();
        assert_eq!(cuCtxEnablePeerAccess(to_second, 1), INVALID);
        let not_enabled = Err(CUresult::CUDA_ERROR_PEER_ACCESS_NOT_ENABLED);
        assert_eq!(cuCtxDisablePeerAccess(to_second), not_enabled);
        cuCtxEnablePeerAccess(to_second, 0).unwrap();
        let enabled = Err(CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
        assert_eq!(cuCtxEnablePeerAccess(to_second, 0), enabled);
    }
    poke(address, 0, 3);
    assert_eq!(peek(address, 1), 3);
    let mine = alloc(100).unwrap();
    assert!(!is_accessible(mine, 100, 1), "access goes one way");
    // SAFETY: as above.
    unsafe { cuCtxDisablePeerAccess(to_second) }.unwrap();
    assert!(span(address, 0).is_none());
    let (mut can, mut same) = (7, 7);
    // SAFETY: the out parameters are local variables.
    unsafe {
        cuDeviceCanAccessPeer(&raw mut can, 0, 1).unwrap();
        cuDeviceCanAccessPeer(&raw mut same, 1, 1).unwrap();
        let nowhere = Err(CUresult::CUDA_ERROR_INVALID_DEVICE);
        assert_eq!(cuDeviceCanAccessPeer(&raw mut can, 0, 2), nowhere);
        assert_eq!(cuDeviceGetP2PAttribute(&raw mut same, 2, 1, 1), nowhere);
        assert_eq!(cuDeviceGetP2PAttribute(&raw mut same, 99, 0, 1), INVALID);
        cuDeviceGetP2PAttribute(&raw mut can, 2, 0, 1).unwrap();
    }
    assert_eq!((can, same), (1, 0));
    free(mine).unwrap();
    free(address).unwrap();
}

#[test]
fn threads_do_not_get_each_other_s_memory() {
    let context = context();
    std::thread::scope(|scope| {
        for thread in 0..8_u8 {
            let handle = context.handle;
            scope.spawn(move || {
                // SAFETY: the handle is a live context's.
                unsafe { cuCtxSetCurrent(handle as _) }.unwrap();
                for round in 0..300 {
                    let live: Vec<_> = (0..4).map(|index| alloc(1000 + index * 700_000).unwrap()).collect();
                    live.iter().for_each(|address| poke(address + 999, 0, thread));
                    assert!(live.iter().all(|address| peek(address + 999, 0) == thread), "round {round}");
                    live.into_iter().for_each(|address| free(address).unwrap());
                }
            });
        }
    });
}
