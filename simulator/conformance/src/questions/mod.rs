//! What only a GPU can settle. Each answer of the simulated driver is what it assumes.

mod checkpoint;
mod copies;
pub mod jobs;
mod memory;
mod waits;

use std::ffi::{CString, c_void};

use cuda_abi::sys::CUdevice_attribute as A;

use crate::check::{Check, Result, question};
use crate::{cu, gpu, ok};

/// The questions.
pub const CHECKS: &[Check] = &[
    question("question/device", "which device and driver these answers are of", device),
    question(
        "question/pointers-are-symbols",
        "are cuGetProcAddress's pointers the same as dlsym's",
        pointers,
    ),
    question(
        "question/suffixed-name",
        "does cuGetProcAddress find cuMemAlloc_v2 by that name",
        suffixed_name,
    ),
    question("question/null-status-result", "what an unknown name gives without a status", null_status),
    question(
        "question/pool-reuse",
        "is memory freed on a stream reused by a later allocation on it before the free has run",
        memory::pool_reuse,
    ),
    question(
        "question/attributes",
        "ranges and attributes of plain and of mapped memory",
        memory::attributes,
    ),
    question(
        "question/memory-info",
        "what cuMemGetInfo counts of reserved, created and mapped memory",
        memory::info,
    ),
    question(
        "question/ipc-on-vmm",
        "which error cuIpcGetMemHandle gives for mapped memory",
        memory::ipc_on_vmm,
    ),
    question(
        "question/ipc-interior",
        "what cuIpcGetMemHandle makes of an inner address",
        memory::ipc_interior,
    ),
    question(
        "question/sync-memops-on-vmm",
        "can SYNC_MEMOPS be set on plain and on mapped memory",
        memory::sync_memops,
    ),
    question(
        "question/vmm-in-capture",
        "which calls on memory each mode of capture permits",
        memory::in_capture,
    ),
    question(
        "question/fixed-address",
        "is a fixed address honoured by cuMemAddressReserve in a new process",
        memory::fixed_address,
    ),
    question(
        "question/parked-memory",
        "does exported memory live while only a process without CUDA holds it",
        memory::parked,
    ),
    question(
        "question/teardown",
        "is exported memory gone once no process has the device open (source: open-gpu-kernel-modules, nv.c; without persistence mode)",
        memory::teardown,
    ),
    question(
        "question/multicast-bound",
        "what a multicast object gives back that is released while memory is bound, and a device that is added twice",
        memory::multicast_bound,
    ),
    question(
        "question/host-access-kinds",
        "which locations of the host cuMemSetAccess takes for which memory of the host",
        memory::host_access,
    ),
    question(
        "question/checkpoint-host-memory",
        "whether a self-checkpoint keeps memory of a NUMA node, its content and the host's access",
        checkpoint::host_memory,
    ),
    question("question/fresh-memory", "is fresh memory of cuMemAlloc and of cuMemCreate zero", memory::fresh),
    question(
        "question/bandwidth",
        "copy speed of cuMemHostAlloc, of a memfd with cuMemHostRegister, and pageable",
        memory::bandwidth,
    ),
    question(
        "question/pinning-by-threads",
        "how long it takes to register memory in pieces, and to unregister it, by one thread and by several",
        copies::pinning_by_threads,
    ),
    question(
        "question/unpinning-during-copies",
        "whether memory can be unregistered while other memory is copied, without waiting for that",
        copies::unpinning_during_copies,
    ),
    question(
        "question/copies-through-a-ring",
        "copy speed of memory that is not pinned, by threads that have pinned memory each",
        copies::through_a_ring,
    ),
    question("question/what-waits", "which calls wait for a running kernel", waits::what_waits),
    question(
        "question/checkpoint-empty",
        "a self-checkpoint without memory: how long, what is left open",
        checkpoint::empty,
    ),
    question("question/checkpoint-plain", "a self-checkpoint with memory of cuMemAlloc", checkpoint::plain),
    question("question/checkpoint-mapped", "a self-checkpoint with mapped memory", checkpoint::mapped_memory),
    question(
        "question/checkpoint-unmapped",
        "a self-checkpoint with an address range whose memory was released",
        checkpoint::unmapped,
    ),
    question(
        "question/checkpoint-exportable",
        "a self-checkpoint with mapped memory that can be exported",
        checkpoint::exportable,
    ),
    question(
        "question/checkpoint-parked",
        "a self-checkpoint while another process holds the memory",
        checkpoint::parked,
    ),
    question(
        "question/ipc-in-a-job",
        "is memory that processes share by CUDA IPC saved, outside and inside a job of cuda-checkpoint --launch-job",
        jobs::ipc,
    ),
    question(
        "question/turns-after-teardown",
        "does the device switch between the kernels of two processes again once it was torn down",
        checkpoint::turns_after_teardown,
    ),
    question(
        "question/released-handle",
        "what becomes of a process that uses the handle of memory that it has released",
        memory::released_handle,
    ),
    question(
        "question/export-after-restore",
        "can memory be exported again after a restore",
        checkpoint::export_after_restore,
    ),
];

fn device() -> Result<String> {
    gpu::start()?;
    let (mut version, mut total) = (0, 0);
    ok!(cuDriverGetVersion(&raw mut version));
    ok!(cuDeviceTotalMem_v2(&raw mut total, 0));
    let mut name = [0_u8; 128];
    ok!(cuDeviceGetName(name.as_mut_ptr().cast(), 128, 0));
    let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
    Ok(format!(
        "{}; driver API {version}; {total} bytes in units of {}; VMM {}, POSIX descriptors {}, RDMA with VMM {}, pools {}",
        String::from_utf8_lossy(&name[..end]),
        crate::vmm::granularity()?,
        gpu::device_attribute(A::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)?,
        gpu::device_attribute(A::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)?,
        gpu::device_attribute(A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED)?,
        gpu::device_attribute(A::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED)?,
    ))
}

fn address(name: &str, flags: u64) -> Result<(u32, *const c_void, u32)> {
    let name = CString::new(name).expect("names have no NUL");
    let (mut address, mut status) = (std::ptr::null_mut(), 77);
    let code = cu!(cuGetProcAddress_v2(name.as_ptr(), &raw mut address, 12000, flags, &raw mut status));
    Ok((code, address, status))
}

fn pointers() -> Result<String> {
    gpu::start()?;
    let mut lines = Vec::new();
    for (name, symbol, per_thread) in [
        ("cuMemAlloc", "cuMemAlloc_v2", None),
        ("cuLaunchKernel", "cuLaunchKernel", Some("cuLaunchKernel_ptsz")),
        ("cuMemcpyHtoDAsync", "cuMemcpyHtoDAsync_v2", Some("cuMemcpyHtoDAsync_v2_ptsz")),
        ("cuCtxSynchronize", "cuCtxSynchronize", None),
        ("cuStreamSynchronize", "cuStreamSynchronize", Some("cuStreamSynchronize_ptsz")),
    ] {
        let same = address(name, 1)?.1 == gpu::api().symbol(symbol);
        let mut line = format!("{name}: {}", if same { "same" } else { "differs" });
        if symbol != name && address(name, 1)?.1 == gpu::api().symbol(name) {
            line += " as the symbol without a version";
        }
        if let Some(symbol) = per_thread {
            let same = address(name, 2)?.1 == gpu::api().symbol(symbol);
            line += if same { ", per thread same" } else { ", per thread differs" };
        }
        lines.push(line);
    }
    Ok(lines.join("; "))
}

fn suffixed_name() -> Result<String> {
    let (code, address, status) = address("cuMemAlloc_v2", 0)?;
    Ok(format!(
        "{}, status {status}, {}",
        gpu::name_of(code),
        if address.is_null() { "NULL" } else { "found" }
    ))
}

fn null_status() -> Result<String> {
    let mut address = std::ptr::dangling_mut();
    let (name, none) = (c"cuThereIsNoSuchCall", std::ptr::null_mut());
    let code = cu!(cuGetProcAddress_v2(name.as_ptr(), &raw mut address, 12000, 0, none));
    let second = if address.is_null() { "NULL" } else { "not NULL" };
    Ok(format!("{}, {second}", gpu::name_of(code)))
}
