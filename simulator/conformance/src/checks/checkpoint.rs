//! The checkpoint API.

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};

use cuda_abi::sys::{CUcheckpointGpuPair, CUdevice_attribute, CUuuid};
use cuda_abi::types::*;

use crate::check::{Check, Result, check, expect_equal, failed, skipped};
use crate::ckpt::{checkpoint, cycle, lock, me, restore, state, try_lock, unlock};
use crate::gpu::Flag;
use crate::helper::Helper;
use crate::multicast::{self, Team};
use crate::vmm::{READ_WRITE, allow, create, granularity, map, mapped};
use crate::{cu, ensure, gives, gpu, kernels, ok, refuses, turns};

/// The checks of this area.
pub const CHECKS: &[Check] = &[
    check(
        "checkpoint/states",
        "running, locked, checkpointed, locked, running (reference, CUprocessState)",
        states,
    ),
    check(
        "checkpoint/wrong-state",
        "a step out of its turn is CUDA_ERROR_ILLEGAL_STATE (reference, cuCheckpointProcess…)",
        wrong_state,
    ),
    check(
        "checkpoint/lock-needs-a-context",
        "without a context the lock is CUDA_ERROR_NOT_INITIALIZED (source: llm-d-rl-time-slicing issue 148), or succeeds (580.159.04)",
        lock_needs_a_context,
    ),
    check(
        "checkpoint/content",
        "memory of every kind has its content and address afterwards (reference)",
        content,
    ),
    check(
        "checkpoint/work-goes-on",
        "streams, events, modules and graphs work after the restore as before",
        work_goes_on,
    ),
    check(
        "checkpoint/gives-memory-back",
        "a checkpointed process holds no device memory (reference, cuCheckpointProcessCheckpoint)",
        gives_memory_back,
    ),
    check(
        "checkpoint/lock-waits-for-work",
        "the lock waits for submitted work (reference, cuCheckpointProcessLock)",
        lock_waits,
    ),
    check(
        "checkpoint/lock-timeout",
        "a lock that takes too long is CUDA_ERROR_NOT_READY, and the process runs on (reference)",
        lock_timeout,
    ),
    check(
        "checkpoint/calls-wait",
        "calls of other threads wait from the lock to the unlock (reference)",
        calls_wait,
    ),
    check("checkpoint/other-process", "another process does all steps by PID (reference)", other_process),
    check(
        "checkpoint/other-process-calls-wait",
        "calls of the locked process wait for the unlock",
        other_process_calls_wait,
    ),
    check("checkpoint/no-process", "a PID of no process is an error", no_process),
    check("checkpoint/no-cuda", "a process that does not use CUDA is an error", no_cuda),
    check(
        "checkpoint/reserved-fields",
        "fields that are reserved must be 0 (reference, CUcheckpointLockArgs)",
        reserved_fields,
    ),
    check(
        "checkpoint/restore-thread",
        "the restore thread is a thread of the process (reference)",
        restore_thread,
    ),
    check(
        "checkpoint/managed-memory",
        "managed memory makes it fail; the process stays locked and intact; once it is freed, the next one succeeds or is CUDA_ERROR_UNKNOWN (source: seen with 580.159.04)",
        managed_memory,
    ),
    check(
        "checkpoint/cupti",
        "while CUPTI is attached a checkpoint is refused, and the process runs on (source: cuda-checkpoint issue 15); its state is not told either (580.159.04)",
        cupti,
    ),
    check(
        "checkpoint/mig",
        "on an instance of a GPU in MIG mode a checkpoint is refused, and the process runs on; both forms of cuDeviceGetUuid differ there (source: cuda-checkpoint issue 42; reference, cuDeviceGetUuid_v2)",
        mig,
    ),
    check(
        "checkpoint/mps",
        "under MPS a checkpoint is refused, and the process runs on (source: plugins/cuda of CRIU)",
        mps,
    ),
    check(
        "checkpoint/ipc",
        "memory that another process has opened by IPC makes it fail, without harm, or the restore is CUDA_ERROR_INVALID_VALUE, or succeeds (source: seen with 580.159.04)",
        ipc,
    ),
    check(
        "checkpoint/multicast-hangs",
        "a process that holds a multicast object is never checkpointed: the call hangs (source: nccl pull request 2340)",
        multicast_hangs,
    ),
    check(
        "checkpoint/multicast-released",
        "once the object is unbound, unmapped and released, the process is checkpointed as any other (source: nccl pull request 2340)",
        multicast_released,
    ),
    check(
        "checkpoint/kernels-in-turns",
        "the device switches between the kernels of two processes; once it has restored one of them, a kernel that keeps another process waiting for 5 s fails (source: seen with 580.159.04)",
        kernels_in_turns,
    ),
    check("checkpoint/unmapped-range", "a reservation without memory stays reserved", unmapped_range),
    check(
        "checkpoint/graph-after-remap",
        "a graph replays once other memory is mapped where its own was (source: dynamo pull request 13249)",
        graph_after_remap,
    ),
    check("checkpoint/again", "several checkpoints one after the other", again),
    check(
        "checkpoint/pairs",
        "from 580 on, pairs name each GPU once on either side (source: reference, cuCheckpointProcessRestore)",
        pairs,
    ),
    check(
        "checkpoint/pairs-before-580",
        "before 580, where the pairs are is reserved (source: CUDA 12.8, CUcheckpointRestoreArgs)",
        pairs_before_580,
    ),
    check(
        "checkpoint/before-570",
        "before 570 there are no calls (source: cuda-checkpoint, table of releases)",
        before_570,
    ),
];

/// Context, or skipped where the driver has no checkpoint API.
fn start() -> Result {
    gpu::needs_driver(12080)?;
    gpu::start().map(|_| ())
}

fn expect_state(wanted: &str) -> Result {
    expect_equal("state", state(me())?, wanted)
}

/// Another process, for the call would take this one with it.
fn multicast_hangs() -> Result {
    gpu::needs_driver(12080)?;
    multicast::start()?;
    let object = multicast::create(multicast::unit()?, true)?;
    let mut helper = Helper::start()?;
    helper.send(crate::vmm::export(object)?)?;
    helper.number("mc-import")?;
    let pid = helper.pid();
    lock(pid)?;
    let (say, heard) = mpsc::channel();
    let caller = std::thread::spawn(move || {
        let result = checkpoint(pid);
        let _ = say.send(());
        result
    });
    let is_hung = heard.recv_timeout(std::time::Duration::from_secs(2)).is_err();
    helper.kill()?;
    ensure!(is_hung, "the checkpoint returned");
    let killed = caller.join().map_or_else(|_| failed("the caller panicked"), Ok)?;
    ensure!(killed.is_err(), "the checkpoint of a killed process succeeded");
    Ok(())
}

fn multicast_released() -> Result {
    gpu::needs_driver(12080)?;
    multicast::start()?;
    let unit = multicast::unit()?;
    let team = Team::create(unit)?;
    gpu::write(team.members[1].address, &[3_u32])?;
    for device in [0, 1] {
        ok!(cuMulticastUnbind(team.object, device, 0, unit));
    }
    ok!(cuMemUnmap(team.address, unit));
    ok!(cuMemRelease(team.object));
    cycle(me())?;
    gpu::expect_content(team.members[1].address, &[3_u32])
}

fn states() -> Result {
    start()?;
    expect_state("running")?;
    lock(me())?;
    expect_state("locked")?;
    checkpoint(me())?;
    expect_state("checkpointed")?;
    restore(me())?;
    expect_state("locked")?;
    unlock(me())?;
    expect_state("running")
}

fn lock_needs_a_context() -> Result {
    gpu::needs_driver(12080)?;
    let (mut device, mut context) = (0, std::ptr::null_mut());
    ok!(cuInit(0));
    ok!(cuDeviceGet(&raw mut device, 0));
    lock_without_a_context()?;
    ok!(cuDevicePrimaryCtxRetain(&raw mut context, device));
    cycle(me())?;
    ok!(cuDevicePrimaryCtxRelease_v2(device));
    lock_without_a_context()
}

fn lock_without_a_context() -> Result {
    match try_lock(me(), 1000)? {
        0 => unlock(me())?,
        code => expect_equal("the lock", gpu::name_of(code), "CUDA_ERROR_NOT_INITIALIZED".into())?,
    }
    expect_state("running")
}

fn wrong_state() -> Result {
    start()?;
    let none = std::ptr::null_mut;
    gives!(CUDA_ERROR_ILLEGAL_STATE, cuCheckpointProcessCheckpoint(me(), std::ptr::null_mut()));
    gives!(CUDA_ERROR_ILLEGAL_STATE, cuCheckpointProcessUnlock(me(), std::ptr::null_mut()));
    gives!(CUDA_ERROR_ILLEGAL_STATE, cuCheckpointProcessRestore(me(), none()));
    lock(me())?;
    let again = gpu::name_of(try_lock(me(), 1000)?);
    expect_equal("a second lock", again, "CUDA_ERROR_ILLEGAL_STATE".into())?;
    gives!(CUDA_ERROR_ILLEGAL_STATE, cuCheckpointProcessRestore(me(), none()));
    checkpoint(me())?;
    gives!(CUDA_ERROR_ILLEGAL_STATE, cuCheckpointProcessUnlock(me(), std::ptr::null_mut()));
    restore(me())?;
    unlock(me())
}

fn content() -> Result {
    start()?;
    let unit = granularity()?;
    let plain: Vec<u32> = (0..1_000_000).collect();
    let (small, large) = (gpu::upload(&plain[..100])?, gpu::upload(&plain)?);
    let (virtual_, _) = mapped(2 * unit, false)?;
    gpu::write(virtual_ + unit as u64 - 400, &plain[..200])?;
    let (stream, mut pool) = (gpu::stream()?, 0);
    ok!(cuMemAllocAsync(&raw mut pool, 4096, stream));
    ok!(cuMemsetD32Async(pool, 77, 1024, stream));
    ok!(cuStreamSynchronize(stream));
    let module = gpu::module(kernels::MODULE)?;
    let (mut variable, mut size) = (0, 0);
    ok!(cuModuleGetGlobal_v2(&raw mut variable, &raw mut size, module, c"counter".as_ptr()));
    gpu::write(variable, &[1000_u32])?;
    cycle(me())?;
    gpu::expect_content(small, &plain[..100])?;
    gpu::expect_content(large, &plain)?;
    gpu::expect_content(virtual_ + unit as u64 - 400, &plain[..200])?;
    gpu::expect_content(pool, &[77_u32; 1024])?;
    gpu::expect_content(variable, &[1000_u32])
}

fn work_goes_on() -> Result {
    start()?;
    let affine = gpu::function(kernels::BASIC, "affine")?;
    let (stream, address) = (gpu::stream()?, gpu::upload(&[1_u32])?);
    let event = gpu::event(CUevent_flags::CU_EVENT_DEFAULT)?;
    ok!(cuStreamBeginCapture_v2(stream, 0));
    gpu::launch(affine, 1, 1, stream, &[address, 2, 1])?;
    let (mut graph, mut exec) = (std::ptr::null_mut(), std::ptr::null_mut());
    ok!(cuStreamEndCapture(stream, &raw mut graph));
    ok!(cuGraphInstantiateWithFlags(&raw mut exec, graph, 0));
    ok!(cuGraphLaunch(exec, stream));
    ok!(cuEventRecord(event, stream));
    cycle(me())?;
    ok!(cuEventQuery(event));
    ok!(cuGraphLaunch(exec, stream));
    gpu::launch(affine, 1, 1, stream, &[address, 1, 10])?;
    ok!(cuStreamSynchronize(stream));
    gpu::expect_content(address, &[17_u32])?;
    gpu::alloc(1 << 20).map(|_| ())
}

fn graph_after_remap() -> Result {
    start()?;
    let affine = gpu::function(kernels::BASIC, "affine")?;
    let (unit, stream) = (granularity()?, gpu::stream()?);
    let (address, handle) = mapped(unit, false)?;
    gpu::write(address, &[1_u32])?;
    let (mut graph, mut exec) = (std::ptr::null_mut(), std::ptr::null_mut());
    ok!(cuStreamBeginCapture_v2(stream, 0));
    gpu::launch(affine, 1, 1, stream, &[address, 2, 1])?;
    ok!(cuStreamEndCapture(stream, &raw mut graph));
    ok!(cuGraphInstantiateWithFlags(&raw mut exec, graph, 0));
    ok!(cuGraphLaunch(exec, stream));
    ok!(cuStreamSynchronize(stream));
    gpu::expect_content(address, &[3_u32])?;
    ok!(cuMemUnmap(address, unit));
    ok!(cuMemRelease(handle));
    cycle(me())?;
    map(address, unit, create(unit, false)?)?;
    allow(address, unit, READ_WRITE)?;
    gpu::write(address, &[5_u32])?;
    ok!(cuGraphLaunch(exec, stream));
    ok!(cuStreamSynchronize(stream));
    gpu::expect_content(address, &[11_u32])
}

fn gives_memory_back() -> Result {
    start()?;
    let size_bytes = 64 << 20;
    let mut helper = Helper::start()?;
    let address = gpu::alloc(size_bytes)?;
    let before = helper.number("free-bytes")?;
    lock(me())?;
    checkpoint(me())?;
    let during = helper.number("free-bytes")?;
    restore(me())?;
    let after = helper.number("free-bytes")?;
    unlock(me())?;
    ensure!(during >= before + size_bytes as u64, "{before} free before, {during} while checkpointed");
    ensure!(
        after + size_bytes as u64 <= during,
        "{during} free while checkpointed, {after} after the restore"
    );
    ok!(cuMemFree_v2(address));
    Ok(())
}

fn lock_waits() -> Result {
    start()?;
    let affine = gpu::function(kernels::BASIC, "affine")?;
    let (stream, address) = (gpu::stream()?, gpu::upload(&[0_u32])?);
    for _ in 0..500 {
        gpu::launch(affine, 1, 1, stream, &[address, 1, 1])?;
    }
    lock(me())?;
    unlock(me())?;
    ok!(cuStreamQuery(stream));
    gpu::expect_content(address, &[500_u32])
}

fn lock_timeout() -> Result {
    start()?;
    let (stream, flag) = (gpu::stream()?, Flag::new()?);
    flag.hold(stream)?;
    let code = gpu::name_of(try_lock(me(), 200)?);
    expect_equal("a lock while work is held up", code, "CUDA_ERROR_NOT_READY".into())?;
    expect_state("running")?;
    gpu::alloc(4096)?;
    flag.set(1);
    ok!(cuStreamSynchronize(stream));
    cycle(me())
}

fn calls_wait() -> Result {
    let context = {
        start()?;
        let mut context = std::ptr::null_mut();
        ok!(cuCtxGetCurrent(&raw mut context));
        context as usize
    };
    let allocated = Arc::new(AtomicBool::new(false));
    let done = Arc::clone(&allocated);
    lock(me())?;
    let (about_to, wait_for) = mpsc::channel();
    let thread = std::thread::spawn(move || -> Result {
        about_to.send(()).or_else(|_| failed("nobody waits"))?;
        ok!(cuCtxSetCurrent(context as CUcontext));
        gpu::alloc(4096)?;
        done.store(true, Ordering::SeqCst);
        Ok(())
    });
    wait_for.recv().or_else(|_| failed("the thread did not start"))?;
    checkpoint(me())?;
    restore(me())?;
    ensure!(!allocated.load(Ordering::SeqCst), "cuMemAlloc returned while the process was locked");
    unlock(me())?;
    thread.join().unwrap_or_else(|_| failed("a thread panicked"))?;
    ensure!(allocated.load(Ordering::SeqCst), "cuMemAlloc did not return after the unlock");
    Ok(())
}

/// A helper with a filled allocation.
fn victim() -> Result<(Helper, u64)> {
    let mut helper = Helper::start()?;
    let address = helper.number(&format!("alloc {}", 8 << 20))?;
    helper.ask(&format!("fill {address} 4711 {}", 2 << 20))?;
    Ok((helper, address))
}

fn other_process() -> Result {
    start()?;
    let (mut helper, address) = victim()?;
    let pid = helper.pid();
    for (step, wanted) in [
        (lock as fn(i32) -> Result, "locked"),
        (checkpoint, "checkpointed"),
        (restore, "locked"),
        (unlock, "running"),
    ] {
        step(pid)?;
        expect_equal("its state", state(pid)?, wanted)?;
    }
    expect_equal("its content", helper.number(&format!("read {address}"))?, 4711)?;
    expect_state("running")
}

fn other_process_calls_wait() -> Result {
    start()?;
    let (mut helper, address) = victim()?;
    let pid = helper.pid();
    lock(pid)?;
    helper.send_command(&format!("read {address}"))?;
    checkpoint(pid)?;
    restore(pid)?;
    unlock(pid)?;
    expect_equal("the answer", helper.read_answer()?, "4711".into())
}

fn no_process() -> Result {
    start()?;
    let mut state = 0;
    refuses!(cuCheckpointProcessGetState(i32::MAX - 1, &raw mut state));
    ensure!(try_lock(i32::MAX - 1, 100)? != 0, "a process that does not exist was locked");
    Ok(())
}

fn no_cuda() -> Result {
    start()?;
    let helper = Helper::spawn()?;
    ensure!(try_lock(helper.pid(), 100)? != 0, "a process without CUDA was locked");
    Ok(())
}

fn reserved_fields() -> Result {
    start()?;
    let mut args = CUcheckpointLockArgs { timeoutMs: 1000, reserved0: 1, reserved1: [0; 7] };
    gives!(CUDA_ERROR_INVALID_VALUE, cuCheckpointProcessLock(me(), &raw mut args));
    expect_state("running")
}

fn restore_thread() -> Result {
    start()?;
    let mut thread = 0;
    ok!(cuCheckpointProcessGetRestoreThreadId(me(), &raw mut thread));
    let directory = format!("/proc/self/task/{thread}");
    ensure!(std::path::Path::new(&directory).is_dir(), "{thread} is no thread of this process");
    Ok(())
}

fn managed_memory() -> Result {
    start()?;
    let (mut managed, address) = (0, gpu::upload(&[5_u32])?);
    ok!(cuMemAllocManaged(&raw mut managed, 4096, 1));
    lock(me())?;
    gives!(CUDA_ERROR_NOT_SUPPORTED, cuCheckpointProcessCheckpoint(me(), std::ptr::null_mut()));
    expect_state("locked")?;
    unlock(me())?;
    gpu::expect_content(address, &[5_u32])?;
    ok!(cuMemFree_v2(managed));
    lock(me())?;
    gives!(CUDA_SUCCESS | CUDA_ERROR_UNKNOWN, cuCheckpointProcessCheckpoint(me(), std::ptr::null_mut()));
    if state(me())? == "checkpointed" {
        restore(me())?;
    }
    unlock(me())?;
    gpu::expect_content(address, &[5_u32])
}

/// By the PID, since the process is lost if its restore fails.
fn ipc() -> Result {
    start()?;
    let (mut owner, address) = victim()?;
    let handle = owner.ask(&format!("ipc-get {address}"))?;
    let mut opener = Helper::start()?;
    opener.number(&format!("ipc-open {handle}"))?;
    let pid = owner.pid();
    lock(pid)?;
    if cu!(cuCheckpointProcessCheckpoint(pid, std::ptr::null_mut())) == 0 {
        gives!(
            CUDA_SUCCESS | CUDA_ERROR_INVALID_VALUE,
            cuCheckpointProcessRestore(pid, std::ptr::null_mut())
        );
        if state(pid)? != "locked" {
            return owner.kill();
        }
        // Both were seen of one driver.
        unlock(pid)?;
        return expect_equal("its content", owner.number(&format!("read {address}"))?, 4711);
    }
    expect_equal("its state", state(pid)?, "locked")?;
    unlock(pid)?;
    expect_equal("its content", owner.number(&format!("read {address}"))?, 4711)
}

fn unmapped_range() -> Result {
    start()?;
    let unit = granularity()?;
    let (address, handle) = mapped(unit, false)?;
    ok!(cuMemUnmap(address, unit));
    ok!(cuMemRelease(handle));
    cycle(me())?;
    map(address, unit, create(unit, false)?)?;
    allow(address, unit, READ_WRITE)?;
    gpu::write(address, &[1_u32, 2, 3])?;
    gpu::expect_content(address, &[1_u32, 2, 3])
}

fn again() -> Result {
    start()?;
    let address = gpu::upload(&[0_u32; 256])?;
    let count = gpu::function(kernels::BASIC, "count")?;
    for round in 1..=4 {
        gpu::launch(count, 1, 1, std::ptr::null_mut(), &[address])?;
        cycle(me())?;
        gpu::expect_content(address, &[round])?;
    }
    Ok(())
}

/// Tries the first two steps, one of which has to be refused. The process can be used afterwards.
fn is_refused() -> Result {
    const LOCK_TIMEOUT_MS: u32 = 10_000;
    if try_lock(me(), LOCK_TIMEOUT_MS)? == 0 {
        refuses!(cuCheckpointProcessCheckpoint(me(), std::ptr::null_mut()));
        unlock(me())?;
    }
    let mut state = 0;
    gives!(CUDA_SUCCESS | CUDA_ERROR_NOT_SUPPORTED, cuCheckpointProcessGetState(me(), &raw mut state));
    expect_equal("state", state, 0)?;
    gpu::alloc(4096).map(|_| ())
}

/// A function of CUPTI.
fn of_cupti(name: &CStr) -> Result<*mut c_void> {
    for library in [c"libcupti.so.13", c"libcupti.so.12"] {
        // SAFETY: CUPTI's constructors may run.
        let library = unsafe { libc::dlopen(library.as_ptr(), libc::RTLD_NOW) };
        if !library.is_null() {
            // SAFETY: the handle was opened just now.
            let found = unsafe { libc::dlsym(library, name.as_ptr()) };
            ensure!(!found.is_null(), "CUPTI has no {name:?}");
            return Ok(found);
        }
    }
    skipped("there is no CUPTI")
}

fn cupti() -> Result {
    start()?;
    // CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL of cupti_activity.h.
    const KERNELS: u32 = 10;
    // SAFETY: both have this type (cupti_activity.h).
    let [enable, disable] = unsafe {
        std::mem::transmute::<[*mut c_void; 2], [extern "C" fn(u32) -> u32; 2]>([
            of_cupti(c"cuptiActivityEnable")?,
            of_cupti(c"cuptiActivityDisable")?,
        ])
    };
    // SAFETY: it has this type (cupti_result.h).
    let finalize =
        unsafe { std::mem::transmute::<*mut c_void, extern "C" fn() -> u32>(of_cupti(c"cuptiFinalize")?) };
    expect_equal("cuptiActivityEnable", enable(KERNELS), 0)?;
    is_refused()?;
    expect_equal("cuptiActivityDisable", disable(KERNELS), 0)?;
    expect_equal("cuptiFinalize", finalize(), 0)?;
    is_refused()
}

fn kernels_in_turns() -> Result {
    gpu::needs_driver(12080)?;
    let mut first = turns::helper()?;
    let mut second = turns::helper()?;
    let before = turns::are_taken(&mut first, &mut second)?;
    turns::cycle(&mut first)?;
    let after = turns::are_taken(&mut first, &mut second)?;
    expect_equal("whether the device switches, before and after", (before, after), (true, false))?;
    // The process whose kernel waited goes on.
    second.ask("kernel-run").map(drop)
}

fn mig() -> Result {
    start()?;
    let mut uuids = [CUuuid { bytes: [0; 16] }; 2];
    ok!(cuDeviceGetUuid(&raw mut uuids[0], 0));
    ok!(cuDeviceGetUuid_v2(&raw mut uuids[1], 0));
    if uuids[0].bytes == uuids[1].bytes {
        return skipped("the device is a whole GPU");
    }
    is_refused()
}

fn mps() -> Result {
    start()?;
    if gpu::device_attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MPS_ENABLED)? == 0 {
        return skipped("MPS is not running");
    }
    is_refused()
}

/// Restores with each device in the place of the one that `successor` names.
fn restore_with(successor: impl Fn(usize) -> usize, count: usize) -> Result<u32> {
    let mut uuids = vec![CUuuid { bytes: [0; 16] }; count];
    for (device, uuid) in uuids.iter_mut().enumerate() {
        ok!(cuDeviceGetUuid_v2(uuid, i32::try_from(device).unwrap_or(0)));
    }
    let pair =
        |device: usize| CUcheckpointGpuPair { oldUuid: uuids[device], newUuid: uuids[successor(device)] };
    let mut pairs: Vec<_> = (0..count).map(pair).collect();
    // SAFETY: all zeros is a valid value of the structure.
    let mut args: CUcheckpointRestoreArgs = unsafe { std::mem::zeroed() };
    args.gpuPairs = pairs.as_mut_ptr();
    args.gpuPairsCount = u32::try_from(count).unwrap_or(0);
    Ok(cu!(cuCheckpointProcessRestore(me(), &raw mut args)))
}

fn expect_restore(wanted: &str, code: u32) -> Result {
    expect_equal("the restore", gpu::name_of(code), wanted.to_owned())
}

fn device_count() -> Result<usize> {
    let mut count = 0;
    ok!(cuDeviceGetCount(&raw mut count));
    Ok(usize::try_from(count).unwrap_or(0))
}

fn pairs() -> Result {
    gpu::needs_driver(13000)?;
    gpu::start()?;
    gpu::second_device()?;
    let (address, count) = (gpu::upload(&[9_u32; 64])?, device_count()?);
    lock(me())?;
    checkpoint(me())?;
    expect_restore("CUDA_ERROR_INVALID_VALUE", restore_with(|device| device, count - 1)?)?;
    expect_restore("CUDA_ERROR_INVALID_VALUE", restore_with(|_| 0, count)?)?;
    expect_state("checkpointed")?;
    expect_restore("CUDA_SUCCESS", restore_with(|device| device, count)?)?;
    unlock(me())?;
    gpu::expect_content(address, &[9_u32; 64])
}

fn pairs_before_580() -> Result {
    gpu::needs_driver(12080)?;
    if gpu::needs_driver(13000).is_ok() {
        return skipped("the driver takes pairs");
    }
    gpu::start()?;
    lock(me())?;
    checkpoint(me())?;
    expect_restore("CUDA_ERROR_INVALID_VALUE", restore_with(|device| device, device_count()?)?)?;
    restore(me())?;
    unlock(me())
}

fn before_570() -> Result {
    if gpu::needs_driver(12080).is_ok() {
        return skipped("the driver has the calls");
    }
    gpu::start()?;
    // A driver without the symbol ends the check here, as skipped.
    let code = gpu::name_of(try_lock(me(), 1000)?);
    expect_equal("the lock", code, "CUDA_ERROR_NOT_SUPPORTED".into())
}
