//! What every call passes before its handler runs: trace, fault injection, the checkpoint lock.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::LazyLock;

use cuda_abi::Class;
use cuda_abi::sys::CUresult;

use crate::error::Result;
use crate::{checkpoint, faults, process};

thread_local! {
    static PER_THREAD_DEFAULT_STREAM: Cell<bool> = const { Cell::new(false) };
    static IN_HOST_FUNCTION: Cell<bool> = const { Cell::new(false) };
    static IS_INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Whether every call and its result, and what a kernel did wrong, are reported on standard error
/// (`SIMCUDA_TRACE=1`).
pub(crate) fn tracing() -> bool {
    static TRACING: LazyLock<bool> =
        LazyLock::new(|| std::env::var("SIMCUDA_TRACE").is_ok_and(|value| value == "1"));
    *TRACING
}

/// Runs a handler as the entry point `symbol`, which came with the driver of CUDA `since`; `per_thread` says that the symbol
/// is a `_ptsz` or `_ptds` one. An older driver does not have the symbol; here it is there in every release, since all are
/// one library, and refuses.
pub(crate) fn call(
    symbol: &'static str,
    since: i32,
    class: Class,
    per_thread: bool,
    handler: impl FnOnce() -> Result,
) -> u32 {
    let outer = PER_THREAD_DEFAULT_STREAM.replace(per_thread);
    // The handlers' state is behind locks that recover or refuse; the panic itself is reported below.
    let result = catch_unwind(AssertUnwindSafe(|| {
        // Without a release, cuInit says what is wrong.
        let is_missing = process::release().is_ok_and(|release| since > release.cuda_version);
        if is_missing { Err(CUresult::CUDA_ERROR_NOT_SUPPORTED) } else { guarded(symbol, class, handler) }
    }));
    PER_THREAD_DEFAULT_STREAM.set(outer);
    let result = result.unwrap_or_else(|_| {
        eprintln!("simcuda: {symbol} panicked; this is a defect of simcuda");
        Err(CUresult::CUDA_ERROR_UNKNOWN)
    });
    if tracing() {
        trace(symbol, result);
    }
    match result {
        Ok(()) => CUresult::CUDA_SUCCESS as u32,
        Err(error) => error as u32,
    }
}

fn guarded(symbol: &'static str, class: Class, handler: impl FnOnce() -> Result) -> Result {
    // Those of the checkpoint API open and close the lock: they do not wait at it.
    if class == Class::Leave || symbol.starts_with("cuCheckpoint") {
        faults::before(symbol)?;
        return handler();
    }
    let _inside = enter()?;
    faults::before(symbol)?;
    handler()
}

/// Proof that the calling thread's call has passed the checkpoint lock.
pub(crate) struct Inside {
    _passage: checkpoint::lock::Passage,
}

impl Drop for Inside {
    fn drop(&mut self) {
        IS_INSIDE.set(false);
    }
}

/// Waits at the checkpoint lock, unless the calling thread's call has passed it: for what some calls that do not
/// pass it have to do at times, such as loading code.
///
/// # Errors
/// As [`checkpoint::lock::pass`]; `CUDA_ERROR_NOT_PERMITTED` in a host function, for which the lock would wait.
pub(crate) fn enter() -> Result<Option<Inside>> {
    if IN_HOST_FUNCTION.get() {
        return Err(CUresult::CUDA_ERROR_NOT_PERMITTED);
    }
    if IS_INSIDE.get() {
        return Ok(None);
    }
    let _passage = checkpoint::lock::pass()?;
    IS_INSIDE.set(true);
    Ok(Some(Inside { _passage }))
}

fn trace(symbol: &str, result: Result) {
    match result {
        Ok(()) => eprintln!("simcuda: {symbol} = 0"),
        Err(CUresult::CUDA_ERROR_NOT_SUPPORTED) => eprintln!("simcuda: {symbol} is not supported"),
        Err(error) => eprintln!("simcuda: {symbol} = {} ({error:?})", error as u32),
    }
}

/// Whether the current call came through a symbol whose default stream is the thread's own.
pub(crate) fn per_thread_default_stream() -> bool {
    PER_THREAD_DEFAULT_STREAM.get()
}

/// Runs a host function or callback of the program: calls that submit work are not permitted inside it
/// (CUDA driver API reference, cuLaunchHostFunc).
pub(crate) fn in_host_function<T>(body: impl FnOnce() -> T) -> T {
    IN_HOST_FUNCTION.set(true);
    let result = body();
    IN_HOST_FUNCTION.set(false);
    result
}
