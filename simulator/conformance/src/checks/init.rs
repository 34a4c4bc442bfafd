//! Initialisation, fork, names of errors.

use std::ffi::{CStr, c_char};

use crate::check::{Check, Result, check, expect_equal, failed};
use crate::{cu, ensure, gives, gpu, ok};

/// The checks of this area.
pub const CHECKS: &[Check] = &[
    check("init/flags", "cuInit's flags must be 0 (reference, cuInit)", flags),
    check("init/needed", "before cuInit calls give CUDA_ERROR_NOT_INITIALIZED (reference, cuInit)", needed),
    check(
        "init/version-before",
        "cuDriverGetVersion works before cuInit and is at least 11.0",
        version_before,
    ),
    check("init/twice", "cuInit may be called again, also from other threads at once", twice),
    check("init/fork-before", "a child that was forked before cuInit can initialise", fork_before),
    check(
        "init/fork-after",
        "in the child of a fork after cuInit calls give CUDA_ERROR_NOT_INITIALIZED (source: programming guide, Initialization)",
        fork_after,
    ),
    check(
        "init/fork-inherits",
        "the child of a fork keeps the descriptors and the shared mappings that cuInit and a context made (source: open-gpu-kernel-modules, nv-mmap.c; cuda-checkpoint issue 28)",
        fork_inherits,
    ),
    check(
        "init/error-names",
        "cuGetErrorName and cuGetErrorString know their errors (reference)",
        error_names,
    ),
    check(
        "init/unknown-error",
        "an unknown error code is CUDA_ERROR_INVALID_VALUE and NULL (reference, cuGetErrorName)",
        unknown_error,
    ),
];

fn flags() -> Result {
    gives!(CUDA_ERROR_INVALID_VALUE, cuInit(1));
    ok!(cuInit(0));
    Ok(())
}

fn needed() -> Result {
    let (mut count, mut address, mut context) = (0, 0, std::ptr::null_mut());
    gives!(CUDA_ERROR_NOT_INITIALIZED, cuDeviceGetCount(&raw mut count));
    gives!(CUDA_ERROR_NOT_INITIALIZED, cuMemAlloc_v2(&raw mut address, 64));
    gives!(CUDA_ERROR_NOT_INITIALIZED, cuDevicePrimaryCtxRetain(&raw mut context, 0));
    Ok(())
}

fn version_before() -> Result {
    let mut version = 0;
    ok!(cuDriverGetVersion(&raw mut version));
    ensure!(version >= 11000, "version {version}");
    gives!(CUDA_ERROR_INVALID_VALUE, cuDriverGetVersion(std::ptr::null_mut()));
    Ok(())
}

fn twice() -> Result {
    let threads: Vec<_> =
        (0..8).map(|_| std::thread::spawn(|| -> Result<u32> { Ok(cu!(cuInit(0))) })).collect();
    for thread in threads {
        match thread.join() {
            Ok(code) => expect_equal("cuInit", gpu::name_of(code?), "CUDA_SUCCESS".into())?,
            Err(_) => return failed("a thread panicked"),
        }
    }
    ok!(cuInit(0));
    Ok(())
}

/// Runs `body` in a forked child, whose exit status is the result code.
fn in_fork(body: impl FnOnce() -> u32) -> Result<u32> {
    // SAFETY: the child only calls the driver and leaves; no other thread of this program holds a lock that
    // it needs.
    match unsafe { libc::fork() } {
        -1 => failed("fork failed"),
        0 => {
            let code = body();
            // SAFETY: it ends the child without running what the parent registered for its own end.
            unsafe { libc::_exit(i32::try_from(code.min(255)).unwrap_or(255)) }
        }
        child => {
            let mut status = 0;
            // SAFETY: `status` is a live variable and the child is ours.
            let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
            expect_equal("waitpid", waited, child)?;
            ensure!(libc::WIFEXITED(status), "the child was killed (status {status})");
            Ok(libc::WEXITSTATUS(status).unsigned_abs())
        }
    }
}

fn fork_before() -> Result {
    // SAFETY: the call takes an integer only.
    let code = in_fork(|| unsafe { gpu::api().cuInit(0) })?;
    expect_equal("cuInit in the child", gpu::name_of(code), "CUDA_SUCCESS".into())?;
    gpu::start().map(|_| ())
}

fn fork_after() -> Result {
    gpu::start()?;
    let code = in_fork(|| {
        let mut address = 0;
        // SAFETY: `address` is a live variable.
        unsafe { gpu::api().cuMemAlloc_v2(&raw mut address, 4096) }
    })?;
    expect_equal("cuMemAlloc in the child", gpu::name_of(code), "CUDA_ERROR_NOT_INITIALIZED".into())?;
    gpu::alloc(4096).map(|_| ())
}

/// How many descriptors and shared mappings this process has.
fn descriptors_and_mappings() -> (usize, usize) {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let is_shared = |line: &&str| line.split(' ').nth(1).is_some_and(|flags| flags.ends_with('s'));
    let descriptors = std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
    (descriptors, maps.lines().filter(is_shared).count())
}

/// Some of them need not be the driver's own device files: at least one of each has to be there.
fn fork_inherits() -> Result {
    let before = descriptors_and_mappings();
    gpu::start()?;
    let code = in_fork(|| {
        let (descriptors, mappings) = descriptors_and_mappings();
        u32::from(descriptors <= before.0) + 2 * u32::from(mappings <= before.1)
    })?;
    expect_equal("1 without descriptors, 2 without mappings", code, 0)
}

fn error_names() -> Result {
    for (code, name) in [
        (0, "CUDA_SUCCESS"),
        (1, "CUDA_ERROR_INVALID_VALUE"),
        (2, "CUDA_ERROR_OUT_OF_MEMORY"),
        (201, "CUDA_ERROR_INVALID_CONTEXT"),
        (700, "CUDA_ERROR_ILLEGAL_ADDRESS"),
        (999, "CUDA_ERROR_UNKNOWN"),
    ] {
        expect_equal("name", gpu::name_of(code), name.into())?;
        let mut text: *const c_char = std::ptr::null();
        ok!(cuGetErrorString(code, &raw mut text));
        // SAFETY: the driver gave a NUL-terminated text that lives as long as it does.
        let text = unsafe { CStr::from_ptr(text) };
        ensure!(!text.is_empty(), "{name} has no text");
    }
    Ok(())
}

fn unknown_error() -> Result {
    let mut text: *const c_char = c"unchanged".as_ptr();
    gives!(CUDA_ERROR_INVALID_VALUE, cuGetErrorName(12345, &raw mut text));
    expect_equal("name", text, std::ptr::null())?;
    text = c"unchanged".as_ptr();
    gives!(CUDA_ERROR_INVALID_VALUE, cuGetErrorString(12345, &raw mut text));
    expect_equal("text", text, std::ptr::null())
}
