//! Which calls wait for work that is running.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use cuda_abi::types::*;

use crate::check::{Result, failed};
use crate::gpu::Flag;
use crate::vmm::{granularity, mapped, properties};
use crate::{gpu, kernels, ok};

/// A call that has not returned after this long counts as waiting: the kernel runs until its flag is set.
const RETURN_TIMEOUT: Duration = Duration::from_millis(300);

type Call = Box<dyn FnOnce() -> Result + Send>;

/// A call of the driver that has to succeed, with its name in the answer.
macro_rules! row {
    ($name:literal, $($driver_call:tt)+) => {
        ($name, call(move || { ok!($($driver_call)+); Ok(()) }))
    };
}

/// The calls, each with the objects that it needs.
fn calls(stream: usize) -> Result<Vec<(&'static str, Call)>> {
    let unit = granularity()?;
    let (unmapped, _) = mapped(unit, false)?;
    let (address, handle) = mapped(unit, false)?;
    let (plain, pinned) = (gpu::alloc(64 << 20)?, gpu::pinned(1 << 20)? as usize);
    let pages = vec![0_u8; 1 << 20].leak().as_mut_ptr() as usize;
    ok!(cuMemHostRegister_v2(pages as *mut c_void, 1 << 20, 0));
    let module = gpu::module(kernels::MODULE)? as usize;
    let other = gpu::stream()? as usize;
    let event = gpu::event(CUevent_flags::CU_EVENT_DEFAULT)? as usize;
    ok!(cuEventRecord(event as CUevent, stream as CUstream));
    let filled = gpu::alloc(4096)?;
    Ok(vec![
        row!("cuMemUnmap", cuMemUnmap(unmapped, unit)),
        row!("cuMemRelease", cuMemRelease(handle)),
        ("cuMemSetAccess", call(move || crate::vmm::allow(address, unit, crate::vmm::READ_WRITE))),
        (
            "cuMemCreate",
            call(move || {
                let (properties, mut handle) = (properties(0, false), 0);
                ok!(cuMemCreate(&raw mut handle, unit, &raw const properties, 0));
                Ok(())
            }),
        ),
        ("cuMemAlloc", call(|| gpu::alloc(16 << 20).map(|_| ()))),
        row!("cuMemFree", cuMemFree_v2(plain)),
        ("cuMemHostAlloc", call(|| gpu::pinned(1 << 20).map(|_| ()))),
        row!("cuMemFreeHost", cuMemFreeHost(pinned as *mut c_void)),
        row!("cuMemHostUnregister", cuMemHostUnregister(pages as *mut c_void)),
        ("cuModuleLoadData", call(|| gpu::module(kernels::MODULE).map(|_| ()))),
        row!("cuModuleUnload", cuModuleUnload(module as CUmodule)),
        ("cuStreamCreate", call(|| gpu::stream().map(|_| ()))),
        row!("cuStreamDestroy (idle)", cuStreamDestroy_v2(other as CUstream)),
        row!("cuEventDestroy (pending)", cuEventDestroy_v2(event as CUevent)),
        row!("cuMemsetD8 (device)", cuMemsetD8_v2(filled, 1, 4096)),
        row!("cuMemcpyDtoD", cuMemcpyDtoD_v2(filled, filled + 2048, 2048)),
        row!("cuStreamDestroy (busy)", cuStreamDestroy_v2(stream as CUstream)),
    ])
}

fn call(body: impl FnOnce() -> Result + Send + 'static) -> Call {
    Box::new(body)
}

pub(super) fn what_waits() -> Result<String> {
    let context = gpu::start()? as usize;
    let wait = gpu::function(kernels::BASIC, "wait_then_store")?;
    let out = gpu::alloc(4)?;
    let names: Vec<_> = calls(gpu::stream()? as usize)?.into_iter().map(|(name, _)| name).collect();
    let mut answers = Vec::new();
    for (index, name) in names.iter().enumerate() {
        // A call that waits may make later calls wait for it, so each call gets a kernel of its own.
        let (flag, stream) = (Flag::new()?, gpu::stream()?);
        let (_, call) = calls(stream as usize)?.swap_remove(index);
        gpu::synchronize()?;
        gpu::launch(wait, 1, 1, stream, &[flag.address(), out, 1])?;
        let (done, wait_for) = mpsc::channel();
        let start = Instant::now();
        let thread = std::thread::spawn(move || -> Result {
            ok!(cuCtxSetCurrent(context as CUcontext));
            let outcome = call();
            // The receiver may have timed out: that is an answer, too.
            let _ = done.send(());
            outcome
        });
        let returned = wait_for.recv_timeout(RETURN_TIMEOUT).is_ok();
        let took_us = start.elapsed().as_micros();
        flag.set(1);
        thread.join().unwrap_or_else(|_| failed("a thread panicked"))?;
        gpu::synchronize()?;
        answers.push(if returned { format!("{name}: no ({took_us} us)") } else { format!("{name}: WAITS") });
    }
    Ok(answers.join("; "))
}
