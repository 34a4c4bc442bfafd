//! Memory that two processes share.

use std::os::fd::AsRawFd;
use std::process::{Command, Stdio};

use cuda_abi::layout::{POSIX_DESCRIPTOR, PoolProperties};
use cuda_abi::sys;
use cuda_abi::types::{CUmemPoolPtrExportData, CUmemoryPool};

use super::vmm::{
    create_exportable, export, import, map, release, release_range, reserve, set_access, unmap,
};
use super::*;
use crate::process;

const ROLE: &str = "SIMCUDA_TEST_ROLE";
const DESCRIPTOR: &str = "SIMCUDA_TEST_DESCRIPTOR";
const HANDLE: &str = "SIMCUDA_TEST_HANDLE";

/// Another process on the same devices that runs the test `other_process` in the given role. Returns what it
/// wrote on standard output.
fn other_process(role: &str, variables: &[(&str, String)]) -> String {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["memory::tests::sharing::in_the_other_process", "--exact", "--nocapture"])
        .env(ROLE, role)
        .envs(variables.iter().map(|(name, value)| (*name, value.as_str())))
        .stderr(Stdio::inherit())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{role}: {text}");
    text
}

/// What the other process does.
#[test]
fn in_the_other_process() {
    let Ok(role) = std::env::var(ROLE) else { return };
    // SAFETY: cuInit has no preconditions.
    unsafe { process::cuInit(0) }.unwrap();
    let mut handle = std::ptr::null_mut();
    // SAFETY: `handle` is a local variable.
    unsafe { crate::context::cuCtxCreate_v2(&raw mut handle, 0, 0) }.unwrap();
    match role.as_str() {
        "import" => {
            let imported = import(std::env::var(DESCRIPTOR).unwrap().parse().unwrap()).unwrap();
            let range = reserve(PAGE).unwrap();
            map(range, PAGE, imported).unwrap();
            set_access(range, PAGE, 0, 3).unwrap();
            assert_eq!(peek(range, 0), 0x11);
            poke(range + 1, 0, 0x22);
        }
        "open" => open_ipc_handle(),
        "take and die" => {
            alloc(700 * MIB).unwrap();
            // SAFETY: the process ends without giving anything back, which is what is tested.
            unsafe { libc::_exit(0) };
        }
        other => panic!("unknown role {other}"),
    }
}

fn parse_handle() -> sys::CUipcMemHandle {
    let hex = std::env::var(HANDLE).unwrap();
    let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
    for (index, byte) in handle.reserved.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&hex[2 * index..2 * index + 2], 16).unwrap() as _;
    }
    handle
}

fn open_ipc_handle() {
    let handle = parse_handle();
    let open = |flags| {
        let mut address = 0;
        // SAFETY: `address` is a local variable.
        unsafe { cuIpcOpenMemHandle_v2(&raw mut address, handle, flags) }.map(|()| address)
    };
    assert_eq!(open(2).map(|_| ()), INVALID);
    assert_eq!(open(0).map(|_| ()), INVALID);
    let address = open(1).unwrap();
    assert_eq!(open(1), Ok(address), "the same handle again");
    assert_eq!(peek(address + 5, 0), 0x33);
    poke(address + 6, 0, 0x44);
    assert!(is_accessible(address, 1000, 0) && !is_accessible(address, 1001, 0));
    assert_eq!(free(address), INVALID);
    assert_eq!(detach(), Err(CUresult::CUDA_ERROR_NOT_SUPPORTED));
    // SAFETY: an address is only looked up.
    unsafe {
        assert_eq!(cuIpcCloseMemHandle(address + 1), INVALID);
        cuIpcCloseMemHandle(address).unwrap();
        assert!(is_accessible(address, 1000, 0), "it was opened twice");
        cuIpcCloseMemHandle(address).unwrap();
        assert_eq!(cuIpcCloseMemHandle(address), INVALID);
    }
    assert!(span(address, 0).is_none());
    let mut damaged = handle;
    damaged.reserved[30] ^= 1;
    let mut address = 0;
    // SAFETY: `address` is a local variable.
    assert_eq!(unsafe { cuIpcOpenMemHandle_v2(&raw mut address, damaged, 1) }, INVALID);
}

#[test]
fn a_descriptor_carries_memory_to_another_process() {
    let _context = context();
    let range = reserve(PAGE).unwrap();
    let handle = create_exportable(PAGE).unwrap();
    map(range, PAGE, handle).unwrap();
    set_access(range, PAGE, 0, 3).unwrap();
    poke(range, 0, 0x11);
    let descriptor = export(handle).unwrap();
    // SAFETY: dup makes a descriptor that the other process inherits.
    let inherited = unsafe { libc::dup(descriptor.as_raw_fd()) };
    other_process("import", &[(DESCRIPTOR, inherited.to_string())]);
    // SAFETY: the descriptor is this test's.
    unsafe { libc::close(inherited) };
    assert_eq!(peek(range + 1, 0), 0x22);
    unmap(range, PAGE).unwrap();
    release(handle).unwrap();
    release_range(range, PAGE).unwrap();
}

#[test]
fn an_ipc_handle_opens_memory_in_another_process_only() {
    let _context = context();
    // In the middle of a page that others share.
    let before = alloc(100).unwrap();
    let address = alloc(1000).unwrap();
    poke(address + 5, 0, 0x33);
    let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
    let mut opened = 0;
    // SAFETY: the out parameters are local variables.
    unsafe {
        assert_eq!(cuIpcGetMemHandle(&raw mut handle, address + 1), INVALID);
        cuIpcGetMemHandle(&raw mut handle, address).unwrap();
        let own = cuIpcOpenMemHandle_v2(&raw mut opened, handle, 1);
        assert_eq!(own, Err(CUresult::CUDA_ERROR_INVALID_CONTEXT));
        let nothing = sys::CUipcMemHandle { reserved: [0; 64] };
        assert_eq!(cuIpcOpenMemHandle_v2(&raw mut opened, nothing, 1), INVALID);
        assert_eq!(cuIpcCloseMemHandle(address), INVALID);
    }
    let hex: String = handle.reserved.iter().map(|byte| format!("{:02x}", *byte as u8)).collect();
    other_process("open", &[(HANDLE, hex)]);
    assert_eq!(peek(address + 6, 0), 0x44);
    free(address).unwrap();
    free(before).unwrap();
}

#[test]
fn vmm_and_pool_memory_has_no_ipc_handle() {
    let _context = context();
    let range = reserve(PAGE).unwrap();
    let memory = create_exportable(PAGE).unwrap();
    map(range, PAGE, memory).unwrap();
    let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
    let mut of_pool = 0;
    // SAFETY: the out parameters are local variables.
    unsafe {
        assert_eq!(cuIpcGetMemHandle(&raw mut handle, range), INVALID);
        cuMemAllocAsync(&raw mut of_pool, 100, std::ptr::null_mut()).unwrap();
        assert_eq!(cuIpcGetMemHandle(&raw mut handle, of_pool), INVALID);
    }
    free(of_pool).unwrap();
    unmap(range, PAGE).unwrap();
    release(memory).unwrap();
    release_range(range, PAGE).unwrap();
}

#[test]
fn the_memory_of_a_process_that_died_is_free_again() {
    if !is_own_process("memory::tests::sharing::the_memory_of_a_process_that_died_is_free_again", &[]) {
        return;
    }
    let _context = context();
    other_process("take and die", &[]);
    assert_eq!(free_bytes(), 1 << 30);
    other_process("take and die", &[]);
    let address = alloc(600 * MIB).unwrap();
    free(address).unwrap();
}

fn exportable_pool() -> CUmemoryPool {
    let properties = PoolProperties { handle_types: POSIX_DESCRIPTOR.0, ..PoolProperties::of(0) };
    let mut pool = std::ptr::null_mut();
    // SAFETY: both are local variables, of the layout that the call expects.
    unsafe { cuMemPoolCreate(&raw mut pool, (&raw const properties).cast()) }.unwrap();
    pool
}

fn exported(pool: CUmemoryPool) -> Result<i32> {
    let mut descriptor = -1;
    // SAFETY: `descriptor` is a local variable.
    unsafe { cuMemPoolExportToShareableHandle((&raw mut descriptor).cast(), pool, POSIX_DESCRIPTOR, 0) }
        .map(|()| descriptor)
}

fn imported(descriptor: i32) -> Result<CUmemoryPool> {
    let (mut pool, handle) = (std::ptr::null_mut(), descriptor as usize as *mut std::ffi::c_void);
    // SAFETY: `pool` is a local variable; the descriptor is open.
    unsafe { cuMemPoolImportFromShareableHandle(&raw mut pool, handle, POSIX_DESCRIPTOR, 0) }.map(|()| pool)
}

fn taken_from(pool: CUmemoryPool, size_bytes: usize) -> Result<u64> {
    let mut address = 0;
    // SAFETY: `address` is a local variable.
    unsafe { cuMemAllocFromPoolAsync(&raw mut address, size_bytes, pool, std::ptr::null_mut()) }
        .map(|()| address)
}

fn pointer_of(address: u64) -> Result<CUmemPoolPtrExportData> {
    let mut data = CUmemPoolPtrExportData { reserved: [0; 64] };
    // SAFETY: `data` is a local variable.
    unsafe { cuMemPoolExportPointer(&raw mut data, address) }.map(|()| data)
}

fn opened(pool: CUmemoryPool, data: &CUmemPoolPtrExportData) -> Result<u64> {
    let (mut address, mut data) = (0, *data);
    // SAFETY: both are local variables.
    unsafe { cuMemPoolImportPointer(&raw mut address, pool, &raw mut data) }.map(|()| address)
}

/// What each call refuses; a process that imports what it has exported itself is as good as any other here.
#[test]
fn a_pool_is_shared_within_its_rules() {
    if !is_own_process("memory::tests::sharing::a_pool_is_shared_within_its_rules", &[]) {
        return;
    }
    let context = context();
    let pool = exportable_pool();
    let address = taken_from(pool, 3 * MIB).unwrap();
    assert_eq!(pointer_of(address).map(|_| ()), INVALID, "the pool is not exported yet");
    let descriptor = exported(pool).unwrap();
    let data = pointer_of(address).unwrap();
    assert_eq!(pointer_of(address + 512).map(|_| ()), INVALID);
    let (first, other) = (imported(descriptor).unwrap(), exportable_pool());
    assert_eq!(opened(other, &data).map(|_| ()), INVALID, "a pool that was not imported");
    assert_eq!(exported(first).map(|_| ()), INVALID, "an imported pool");
    let of_other = imported(exported(other).unwrap()).unwrap();
    assert_eq!(opened(of_other, &data).map(|_| ()), INVALID, "another pool's");
    assert_eq!(taken_from(first, 512).map(|_| ()), INVALID);
    let used = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT as u32;
    let mut bytes = 0_u64;
    // SAFETY: `bytes` is a local variable.
    let answer = unsafe { cuMemPoolGetAttribute(first, used, (&raw mut bytes).cast()) };
    assert_eq!(answer, INVALID, "what an imported pool has");
    let here = opened(first, &data).unwrap();
    crate::stream::synchronize_context(&context).unwrap();
    poke(here + 7, 0, 0x55);
    assert_eq!(peek(address + 7, 0), 0x55);
    // SAFETY: an address is only looked up.
    assert_eq!(unsafe { cuIpcCloseMemHandle(here) }, INVALID);
    assert_eq!(detach(), Err(CUresult::CUDA_ERROR_NOT_SUPPORTED));
    // SAFETY: a handle is only looked up.
    unsafe { cuMemPoolDestroy(first) }.unwrap();
    assert_eq!(peek(here + 7, 0), 0x55, "the allocation outlives its pool's handle");
    assert_eq!(opened(first, &data).map(|_| ()), INVALID);
    free(here).unwrap();
    assert!(span(here, 0).is_none());
    free(address).unwrap();
    // SAFETY: a handle is only looked up.
    unsafe { cuMemPoolTrimTo(pool, 0) }.unwrap();
    assert_eq!(free_bytes(), (1 << 30) - 4 * MIB, "a pool that can be shared gives nothing back");
    // SAFETY: a handle is only looked up.
    unsafe { cuMemPoolDestroy(pool) }.unwrap();
    assert_eq!(free_bytes(), 1 << 30);
    // SAFETY: the descriptor is this test's.
    unsafe { libc::close(descriptor) };
}
