//! Memory that processes share: exported descriptors and IPC handles.

use std::os::fd::AsRawFd;

use cuda_abi::sys::CUmemAllocationHandleType as Kind;
use cuda_abi::types::*;

use crate::check::{Check, Result, check, expect_equal};
use crate::helper::Helper;
use crate::vmm::{READ_WRITE, allow, create, export, granularity, import, map, mapped, reserve};
use crate::{ensure, gives, gpu, ok, refuses, roles};

/// The checks of this area.
pub const CHECKS: &[Check] = &[
    check(
        "share/same-process",
        "an imported descriptor is the same memory (programming guide)",
        same_process,
    ),
    check("share/other-process", "another process imports a descriptor and shares the memory", other_process),
    check(
        "share/not-exportable",
        "memory created without a handle type cannot be exported (reference)",
        not_exportable,
    ),
    check(
        "share/outlives-handle",
        "a descriptor keeps memory alive that was unmapped and released",
        outlives_handle,
    ),
    check(
        "share/outlives-exporter",
        "a descriptor keeps memory alive after its process was killed, while another one has the device open",
        outlives_exporter,
    ),
    check("share/counts-once", "shared memory counts once, until its last holder releases it", counts_once),
    check("share/import-rubbish", "a descriptor of something else cannot be imported", import_rubbish),
    check(
        "share/import-size",
        "an imported handle has the size of the memory (source: seen with 580.159.04)",
        import_size,
    ),
    check(
        "share/import-again",
        "imported memory cannot be exported again, its own process's either; its descriptor can be imported again (source: seen with 580.159.04)",
        import_again,
    ),
    check(
        "ipc/other-process",
        "another process opens an IPC handle and shares the memory (reference)",
        ipc_other_process,
    ),
    check(
        "ipc/same-process",
        "a process cannot open its own IPC handle (reference, cuIpcOpenMemHandle)",
        ipc_same_process,
    ),
    check(
        "ipc/free-imported",
        "cuMemFree of opened memory is an error; cuIpcCloseMemHandle is for it",
        ipc_free_imported,
    ),
    check("ipc/rubbish", "a handle that none gave is refused", ipc_rubbish),
    check("ipc/flags", "cuIpcOpenMemHandle needs its one flag (reference)", ipc_flags),
    check("ipc/host-memory", "there is no IPC handle of pinned host memory (reference)", ipc_host_memory),
    check("ipc/close-unknown", "closing what was not opened is an error (reference)", ipc_close_unknown),
];

fn same_process() -> Result {
    gpu::start()?;
    let unit = granularity()?;
    let (first, handle) = mapped(unit, true)?;
    let descriptor = export(handle)?;
    let second_handle = import(descriptor.as_raw_fd())?;
    drop(descriptor);
    let second = reserve(unit)?;
    map(second, unit, second_handle)?;
    allow(second, unit, READ_WRITE)?;
    gpu::write(first, &[0x77_u32])?;
    gpu::expect_content(second, &[0x77_u32])
}

fn other_process() -> Result {
    gpu::start()?;
    let unit = granularity()?;
    let (address, handle) = mapped(unit, true)?;
    gpu::write(address, &[11_u32])?;
    let mut helper = Helper::start()?;
    helper.send(export(handle)?)?;
    let theirs = helper.number(&format!("import {unit}"))?;
    expect_equal("read by the other process", helper.number(&format!("read {theirs}"))?, 11)?;
    helper.ask(&format!("fill {theirs} 22 4"))?;
    gpu::expect_content(address, &[22_u32; 4])
}

fn not_exportable() -> Result {
    gpu::start()?;
    let handle = create(granularity()?, false)?;
    let mut descriptor = -1_i32;
    let kind = Kind::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    refuses!(cuMemExportToShareableHandle((&raw mut descriptor).cast(), handle, kind, 0));
    Ok(())
}

fn outlives_handle() -> Result {
    gpu::start()?;
    let unit = granularity()?;
    let (address, handle) = mapped(unit, true)?;
    gpu::write(address, &[33_u32])?;
    let descriptor = export(handle)?;
    ok!(cuMemUnmap(address, unit));
    ok!(cuMemRelease(handle));
    let again = import(descriptor.as_raw_fd())?;
    map(address, unit, again)?;
    allow(address, unit, READ_WRITE)?;
    gpu::expect_content(address, &[33_u32])
}

fn outlives_exporter() -> Result {
    gpu::start()?;
    let mut helper = Helper::start()?;
    let unit = 2 << 20;
    let address = helper.number(&format!("create {unit}"))?;
    helper.ask(&format!("fill {address} 44 8"))?;
    helper.ask("export")?;
    let descriptor = helper.receive()?;
    helper.kill()?;
    let handle = import(descriptor.as_raw_fd())?;
    let address = reserve(unit)?;
    map(address, unit, handle)?;
    allow(address, unit, READ_WRITE)?;
    gpu::expect_content(address, &[44_u32; 8])
}

fn counts_once() -> Result {
    gpu::start()?;
    let size_bytes = 8 * granularity()?;
    let mut helper = Helper::start()?;
    let before = gpu::free_bytes()?;
    let (address, handle) = mapped(size_bytes, true)?;
    helper.send(export(handle)?)?;
    helper.number(&format!("import {size_bytes}"))?;
    expect_equal("free while shared", gpu::free_bytes()?, before - size_bytes)?;
    ok!(cuMemUnmap(address, size_bytes));
    ok!(cuMemRelease(handle));
    ensure!(gpu::free_bytes()? < before, "given back while the other process holds it");
    Ok(())
}

fn import_rubbish() -> Result {
    gpu::start()?;
    let file = tempfile::tempfile();
    let file = file.or_else(|error| crate::check::failed(format!("temporary file: {error}")))?;
    let mut handle = 0;
    for descriptor in [usize::try_from(file.as_raw_fd()).unwrap_or(0), 9999] {
        let kind = Kind::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        refuses!(cuMemImportFromShareableHandle(&raw mut handle, descriptor as *mut c_void, kind));
    }
    Ok(())
}

fn import_size() -> Result {
    gpu::start()?;
    let unit = granularity()?;
    let handle = import(export(create(2 * unit, true)?)?.as_raw_fd())?;
    let address = reserve(4 * unit)?;
    gives!(CUDA_ERROR_INVALID_VALUE | CUDA_ERROR_NOT_SUPPORTED, cuMemMap(address, 4 * unit, 0, handle, 0));
    map(address, 2 * unit, handle)
}

fn refuses_export(handle: u64) -> Result {
    let mut descriptor = -1_i32;
    let kind = Kind::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    gives!(
        CUDA_ERROR_INVALID_VALUE,
        cuMemExportToShareableHandle((&raw mut descriptor).cast(), handle, kind, 0)
    );
    Ok(())
}

fn import_again() -> Result {
    gpu::start()?;
    let unit = granularity()?;
    let (address, handle) = mapped(unit, true)?;
    let descriptor = export(handle)?;
    refuses_export(import(descriptor.as_raw_fd())?)?;
    drop(export(handle)?);
    let mut helper = Helper::start()?;
    helper.number(&format!("create {unit}"))?;
    helper.ask("export")?;
    refuses_export(import(helper.receive()?.as_raw_fd())?)?;
    let second = reserve(unit)?;
    map(second, unit, import(descriptor.as_raw_fd())?)?;
    allow(second, unit, READ_WRITE)?;
    gpu::write(address, &[55_u32])?;
    gpu::expect_content(second, &[55_u32])
}

fn ipc_handle(address: u64) -> Result<CUipcMemHandle> {
    let mut handle = CUipcMemHandle { reserved: [0; 64] };
    ok!(cuIpcGetMemHandle(&raw mut handle, address));
    Ok(handle)
}

fn ipc_other_process() -> Result {
    gpu::start()?;
    let address = gpu::upload(&[66_u32; 64])?;
    let handle = ipc_handle(address)?;
    let mut helper = Helper::start()?;
    let theirs = helper.number(&format!("ipc-open {}", roles::hex_of(&handle)))?;
    expect_equal("read by the other process", helper.number(&format!("read {theirs}"))?, 66)?;
    helper.ask(&format!("fill {theirs} 67 64"))?;
    gpu::expect_content(address, &[67_u32; 64])?;
    helper.ask(&format!("ipc-close {theirs}"))?;
    Ok(())
}

fn ipc_same_process() -> Result {
    gpu::start()?;
    let handle = ipc_handle(gpu::alloc(1 << 20)?)?;
    let mut address = 0;
    refuses!(cuIpcOpenMemHandle_v2(&raw mut address, handle, 1));
    Ok(())
}

/// Opens memory of a helper.
fn open_of(helper: &mut Helper) -> Result<u64> {
    let theirs = helper.number("alloc 1048576")?;
    helper.ask(&format!("fill {theirs} 5 262144"))?;
    let handle = roles::handle_of(&helper.ask(&format!("ipc-get {theirs}"))?)?;
    let mut address = 0;
    ok!(cuIpcOpenMemHandle_v2(&raw mut address, handle, 1));
    Ok(address)
}

fn ipc_free_imported() -> Result {
    gpu::start()?;
    let mut helper = Helper::start()?;
    let address = open_of(&mut helper)?;
    refuses!(cuMemFree_v2(address));
    gpu::expect_content(address, &[5_u32; 16])?;
    ok!(cuIpcCloseMemHandle(address));
    refuses!(cuIpcCloseMemHandle(address));
    Ok(())
}

fn ipc_rubbish() -> Result {
    gpu::start()?;
    let handle = CUipcMemHandle { reserved: [0x55; 64] };
    let mut address = 0;
    refuses!(cuIpcOpenMemHandle_v2(&raw mut address, handle, 1));
    Ok(())
}

fn ipc_flags() -> Result {
    gpu::start()?;
    let mut helper = Helper::start()?;
    let theirs = helper.number("alloc 1048576")?;
    let handle = roles::handle_of(&helper.ask(&format!("ipc-get {theirs}"))?)?;
    let mut address = 0;
    gives!(CUDA_ERROR_INVALID_VALUE, cuIpcOpenMemHandle_v2(&raw mut address, handle, 0));
    Ok(())
}

fn ipc_host_memory() -> Result {
    gpu::start()?;
    let memory = gpu::pinned(4096)?;
    let mut handle = CUipcMemHandle { reserved: [0; 64] };
    refuses!(cuIpcGetMemHandle(&raw mut handle, memory as u64));
    Ok(())
}

fn ipc_close_unknown() -> Result {
    gpu::start()?;
    let address = gpu::alloc(4096)?;
    refuses!(cuIpcCloseMemHandle(address));
    Ok(())
}
