use std::ffi::c_void;

use cuda_abi::layout::{Access, PoolProperties};
use cuda_abi::sys;
use cuda_abi::types::{CUmemLocation, CUmemoryPool, CUstream};

use super::*;
use crate::dispatch;

fn stream() -> CUstream {
    let mut stream = std::ptr::null_mut();
    // SAFETY: `stream` is a local variable.
    unsafe { dispatch::cuStreamCreate(&raw mut stream, 1) }.unwrap();
    stream
}

fn synchronize(stream: CUstream) {
    // SAFETY: the stream is a live one of this test.
    unsafe { dispatch::cuStreamSynchronize(stream) }.unwrap();
}

fn alloc_async(size_bytes: usize, stream: CUstream) -> Result<u64> {
    let mut address = 0;
    // SAFETY: `address` is a local variable.
    unsafe { cuMemAllocAsync(&raw mut address, size_bytes, stream) }.map(|()| address)
}

fn free_async(address: u64, stream: CUstream) -> Result {
    // SAFETY: an address is only looked up.
    unsafe { cuMemFreeAsync(address, stream) }
}

fn properties(device: i32) -> PoolProperties {
    PoolProperties::of(device)
}

fn create_with(properties: &PoolProperties) -> Result<CUmemoryPool> {
    let mut pool = std::ptr::null_mut();
    // SAFETY: both are local variables, of the layout that the call expects.
    unsafe { cuMemPoolCreate(&raw mut pool, (&raw const *properties).cast()) }.map(|()| pool)
}

fn attribute(pool: CUmemoryPool, attribute: u32) -> Result<u64> {
    let mut value = 0_u64;
    // SAFETY: `value` is a local variable that is large enough for every attribute.
    unsafe { cuMemPoolGetAttribute(pool, attribute, (&raw mut value).cast()) }.map(|()| value)
}

fn set_attribute(pool: CUmemoryPool, attribute: u32, mut value: u64) -> Result {
    // SAFETY: `value` is a local variable that is large enough for every attribute.
    unsafe { cuMemPoolSetAttribute(pool, attribute, (&raw mut value).cast::<c_void>()) }
}

/// A flag that a stream waits for until the host raises it.
struct Gate(u64);

impl Gate {
    fn close(stream: CUstream) -> Self {
        let mut flag: *mut c_void = std::ptr::null_mut();
        // SAFETY: `flag` is a local variable.
        unsafe { cuMemAllocHost_v2(&raw mut flag, 4) }.unwrap();
        let gate = Self(flag as u64);
        // SAFETY: the stream is a live one, the address is of pinned memory.
        unsafe { dispatch::cuStreamWaitValue32_v2(stream, gate.0, 1, 0) }.unwrap();
        gate
    }

    fn open(&self) {
        // SAFETY: the flag is this gate's, of 4 aligned bytes, and is accessed atomically only.
        let flag = unsafe { std::sync::atomic::AtomicU32::from_ptr(self.0 as *mut u32) };
        flag.store(1, std::sync::atomic::Ordering::Release);
    }
}

#[test]
fn memory_is_there_only_between_its_places_in_the_order() {
    let _context = context();
    let stream = stream();
    let gate = Gate::close(stream);
    let address = alloc_async(1000, stream).unwrap();
    assert!(span(address, 0).is_none(), "its place in the order has not come");
    assert!(is_accessible(address, 1000, 0), "work behind it may use it");
    assert!(!is_accessible(address, 1001, 0) && !is_accessible(address, 1000, 1));
    assert_eq!(device_of(address), Some(0));
    gate.open();
    synchronize(stream);
    poke(address, 0, 1);
    let gate = Gate::close(stream);
    free_async(address, stream).unwrap();
    assert_eq!(free_async(address, stream), INVALID);
    assert_eq!(free(address), INVALID);
    assert!(span(address, 0).is_some());
    gate.open();
    synchronize(stream);
    assert!(span(address, 0).is_none());
}

#[test]
fn sizes_and_pools_are_checked() {
    let _context = context();
    let stream = stream();
    assert_eq!(alloc_async(0, stream).map(|_| ()), INVALID);
    assert_eq!(alloc_async(2 << 30, stream), Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY));
    assert_eq!(free_async(0x1000, stream), INVALID);
    let mut address = 0;
    // SAFETY: the out parameter is a local variable, and a handle is only looked up.
    let unknown = unsafe { cuMemAllocFromPoolAsync(&raw mut address, 1, 0x77 as CUmemoryPool, stream) };
    assert_eq!(unknown, INVALID);
    let unsupported = Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
    let with = |change: fn(&mut PoolProperties)| {
        let mut properties = properties(0);
        change(&mut properties);
        create_with(&properties).map(|_| ())
    };
    assert_eq!(with(|properties| properties.kind = 0), INVALID);
    assert_eq!(with(|properties| properties.reserved[3] = 1), INVALID);
    assert_eq!(with(|properties| properties.handle_types = 1), Ok(()));
    assert_eq!(with(|properties| properties.handle_types = 9), unsupported);
    assert_eq!(with(|properties| properties.handle_types = 32), INVALID);
    assert_eq!(with(|properties| properties.location.type_ = 3), unsupported);
    assert_eq!(with(|properties| properties.location.id = 2), Err(CUresult::CUDA_ERROR_INVALID_DEVICE));
}

#[test]
fn both_kinds_of_free_take_both_kinds_of_memory() {
    let _context = context();
    let stream = stream();
    let of_pool = alloc_async(100, stream).unwrap();
    free(of_pool).unwrap();
    assert!(span(of_pool, 0).is_none());
    assert_eq!(free(of_pool), INVALID);
    let of_context = alloc(3 * MIB).unwrap();
    let gate = Gate::close(stream);
    free_async(of_context, stream).unwrap();
    assert_eq!(free_async(of_context, stream), INVALID);
    assert!(span(of_context, 0).is_some());
    gate.open();
    synchronize(stream);
    assert!(span(of_context, 0).is_none());
}

#[test]
fn what_exceeds_the_threshold_goes_back_at_a_synchronisation() {
    let _context = context();
    let stream = stream();
    let pool = create_with(&properties(0)).unwrap();
    let mut address = 0;
    // SAFETY: the out parameter is a local variable.
    unsafe { cuMemAllocFromPoolAsync(&raw mut address, 5 * MIB, pool, stream) }.unwrap();
    assert_eq!(attribute(pool, 5), Ok(3 * PAGE));
    assert_eq!(attribute(pool, 7), Ok(5 << 20));
    set_attribute(pool, 4, u64::MAX).unwrap();
    free_async(address, stream).unwrap();
    synchronize(stream);
    after_synchronization();
    assert_eq!((attribute(pool, 5), attribute(pool, 7)), (Ok(3 * PAGE), Ok(0)));
    // What the pool holds is used again.
    let mut again = 0;
    // SAFETY: as above.
    unsafe { cuMemAllocFromPoolAsync(&raw mut again, 6 * MIB, pool, stream) }.unwrap();
    assert_eq!(again, address);
    set_attribute(pool, 4, 0).unwrap();
    free_async(again, stream).unwrap();
    synchronize(stream);
    after_synchronization();
    assert_eq!((attribute(pool, 5), attribute(pool, 6)), (Ok(0), Ok(3 * PAGE)));
    assert_eq!(set_attribute(pool, 6, 1), INVALID);
    assert_eq!(set_attribute(pool, 5, 0), INVALID);
    set_attribute(pool, 6, 0).unwrap();
    assert_eq!(attribute(pool, 6), Ok(0));
    for unknown in [9, 10, 14, 99] {
        assert_eq!(attribute(pool, unknown).map(|_| ()), INVALID, "{unknown}");
    }
    // SAFETY: the pool is this test's.
    unsafe { cuMemPoolDestroy(pool) }.unwrap();
    assert_eq!(attribute(pool, 5).map(|_| ()), INVALID);
}

#[test]
fn a_pool_has_a_limit_and_can_be_trimmed() {
    let _context = context();
    let stream = stream();
    let pool = create_with(&PoolProperties { most_bytes: 4 * MIB, ..properties(0) }).unwrap();
    set_attribute(pool, 4, u64::MAX).unwrap();
    let allocate = |size_bytes| {
        let mut address = 0;
        // SAFETY: the out parameter is a local variable.
        unsafe { cuMemAllocFromPoolAsync(&raw mut address, size_bytes, pool, stream) }.map(|()| address)
    };
    assert_eq!(allocate(5 * MIB), Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY));
    let (a, b) = (allocate(2 * MIB).unwrap(), allocate(2 * MIB).unwrap());
    free_async(a, stream).unwrap();
    synchronize(stream);
    // SAFETY: the pool is this test's.
    unsafe { cuMemPoolTrimTo(pool, 3 * MIB) }.unwrap();
    assert_eq!(attribute(pool, 5), Ok(PAGE));
    // SAFETY: as above.
    unsafe { cuMemPoolDestroy(pool) }.unwrap();
    // The handle is invalid; the memory lives on until it is freed.
    assert_eq!(allocate(1).map(|_| ()), INVALID);
    synchronize(stream);
    poke(b, 0, 1);
    free_async(b, stream).unwrap();
    synchronize(stream);
    assert!(span(b, 0).is_none());
}

#[test]
fn the_default_pool_stays_and_another_can_take_its_place() {
    let _context = context_on(1);
    let get = |which: unsafe fn(*mut CUmemoryPool, i32) -> Result, device| {
        let mut pool = std::ptr::null_mut();
        // SAFETY: `pool` is a local variable.
        unsafe { which(&raw mut pool, device) }.map(|()| pool)
    };
    let default = get(cuDeviceGetDefaultMemPool, 1).unwrap();
    assert_eq!(get(cuDeviceGetMemPool, 1), Ok(default));
    assert_ne!(get(cuDeviceGetDefaultMemPool, 0), Ok(default));
    assert_eq!(get(cuDeviceGetMemPool, 2), Err(CUresult::CUDA_ERROR_INVALID_DEVICE));
    let own = create_with(&properties(1)).unwrap();
    // SAFETY: handles are only looked up.
    unsafe {
        assert_eq!(cuMemPoolDestroy(default), INVALID);
        assert_eq!(cuDeviceSetMemPool(0, own), INVALID);
        cuDeviceSetMemPool(1, own).unwrap();
    }
    assert_eq!(get(cuDeviceGetMemPool, 1), Ok(own));
    // SAFETY: as above.
    unsafe { cuMemPoolDestroy(own) }.unwrap();
    assert_eq!(get(cuDeviceGetMemPool, 1), Ok(default));
}

#[test]
fn access_of_other_devices() {
    let _context = context();
    let stream = stream();
    let pool = create_with(&properties(0)).unwrap();
    let mut address = 0;
    // SAFETY: the out parameter is a local variable.
    unsafe { cuMemAllocFromPoolAsync(&raw mut address, 100, pool, stream) }.unwrap();
    synchronize(stream);
    assert!(span(address, 1).is_none());
    let set = |device, flags| {
        let description = Access { location: CUmemLocation::of(device), flags };
        let description = (&raw const description).cast::<sys::CUmemAccessDesc>();
        // SAFETY: one description, a local variable.
        unsafe { cuMemPoolSetAccess(pool, description, 1) }
    };
    set(1, 3).unwrap();
    assert!(span(address, 1).is_some_and(|span| span.writable) && is_accessible(address, 100, 1));
    assert_eq!(set(0, 0), INVALID, "the pool's own device");
    let mut flags = 0;
    let mut location = CUmemLocation::of(1);
    // SAFETY: all are local variables.
    unsafe { cuMemPoolGetAccess(&raw mut flags, pool, (&raw mut location).cast()) }.unwrap();
    assert_eq!(flags, 3);
    set(1, 0).unwrap();
    assert!(span(address, 1).is_none());
    free(address).unwrap();
    // SAFETY: the pool is this test's.
    unsafe { cuMemPoolDestroy(pool) }.unwrap();
}

#[test]
fn a_loop_that_runs_ahead_does_not_run_out_of_memory() {
    if !is_own_process("memory::tests::pools::a_loop_that_runs_ahead_does_not_run_out_of_memory", &[]) {
        return;
    }
    let _context = context();
    let stream = stream();
    // Together 100 times the device's memory.
    for _ in 0..200 {
        let address = alloc_async(512 * MIB, stream).unwrap();
        free_async(address, stream).unwrap();
    }
    synchronize(stream);
    assert_eq!(free_bytes(), 1 << 30);
}

#[test]
fn a_graph_s_memory_comes_and_goes_with_each_launch() {
    let context = context();
    let address = graph_allocate(0, context.handle, 1000).unwrap();
    assert_eq!(graph_allocate(0, context.handle, 0).map(|_| ()), INVALID);
    for _launch in 0..2 {
        assert!(span(address, 0).is_none());
        pool_activate(address).unwrap();
        assert!(is_accessible(address, 1000, 0));
        poke(address, 0, 1);
        assert_eq!(pool_activate(address), INVALID, "it is there already");
        pool_release(address).unwrap();
        assert_eq!(free(address), INVALID, "it is the graph's");
    }
    // What the last launch leaves is the program's to free when the graph is destroyed.
    graph_set_left(address, true);
    pool_activate(address).unwrap();
    graph_forget(address);
    poke(address, 0, 1);
    assert_eq!(free(address), Ok(()));
    assert!(!is_accessible(address, 1, 0));
    assert_eq!(pool_activate(address), INVALID);
}
