//! Calls of the driver by ourselves: they pass neither the gate nor a handler.

use std::ffi::{CStr, c_char, c_void};
use std::ptr::null;
use std::thread::sleep;
use std::time::Duration;

use cuda_abi::types::*;

use super::entry_points::Index;
use super::real;
use crate::cuda::result::SUCCESS;

macro_rules! call {
    ($( fn $name:ident ( $($arg:ident : $ty:ty),* $(,)? ) = $public:literal since $since:literal, $class:ident
        $(, per_thread $per_thread:ident since $per_thread_since:literal)? ; )*
     $( legacy $legacy:ident = $legacy_public:literal since $legacy_since:literal ; )*) => {
        $(
            #[allow(dead_code, reason = "the table has them all")]
            pub(super) unsafe fn $name($($arg: $ty),*) -> CUresult {
                type Function = unsafe extern "C" fn($($ty),*) -> CUresult;
                let address = real::address(Index::$name as usize);
                if address.is_null() {
                    return cuda_abi::sys::CUresult::CUDA_ERROR_NOT_SUPPORTED as CUresult;
                }
                // SAFETY: the address is that of the driver's symbol, which has the type that the table says.
                let real = unsafe { std::mem::transmute::<*const c_void, Function>(address) };
                // SAFETY: the caller vouches for the parameters.
                unsafe { real($($arg),*) }
            }
        )*
    };
}

cuda_abi::entry_points!(call);

/// How often something is tried that there is no way round, and the pause between two tries.
const TRIES: u32 = 5;
const PAUSE: Duration = Duration::from_millis(20);

/// Tries again what fails, for a while: for what there is no way round when a process's state comes back.
///
/// # Errors
/// The first one: what comes after it may only be its consequence.
pub(super) fn insist<T, E>(mut work: impl FnMut() -> Result<T, E>) -> Result<T, E> {
    let first = match work() {
        Err(error) => error,
        done => return done,
    };
    for _ in 1..TRIES {
        sleep(PAUSE);
        if let Ok(done) = work() {
            return Ok(done);
        }
    }
    Err(first)
}

/// A failed call with its error's name.
///
/// # Errors
/// Every result but success.
pub(super) fn told(call: &str, result: CUresult) -> Result<(), String> {
    if result == SUCCESS {
        return Ok(());
    }
    let mut name: *const c_char = null();
    // SAFETY: `name` is a local variable.
    unsafe { cuGetErrorName(result, &raw mut name) };
    if name.is_null() {
        return Err(format!("{call} failed with error {result}"));
    }
    // SAFETY: the driver's names are NUL-terminated and live as long as the driver.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
    Err(format!("{call} failed with {name} ({result})"))
}
