//! Our own calls of the driver: they pass neither the gate nor a handler.

use std::error::Error;
use std::ffi::{CStr, c_char, c_void};
use std::fmt::{self, Display, Formatter};
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

/// Success, or the driver's error.
pub(super) fn checked(result: CUresult) -> Result<(), CUresult> {
    if result == SUCCESS { Ok(()) } else { Err(result) }
}

/// What a call writes to its out parameter, which is `value` before.
pub(super) fn ask<T>(mut value: T, call: impl FnOnce(*mut T) -> CUresult) -> Result<T, CUresult> {
    checked(call(&raw mut value))?;
    Ok(value)
}

/// The number of attempts of a step without which a process cannot be restored, and the pause between two of them.
const ATTEMPTS: u32 = 5;
const RETRY_PAUSE: Duration = Duration::from_millis(20);

/// Retries a step without which a process cannot be restored.
///
/// # Errors
/// The first one: later ones may only be its consequence.
pub(super) fn retry<T, E>(mut work: impl FnMut() -> Result<T, E>) -> Result<T, E> {
    let first = match work() {
        Err(error) => error,
        done => return done,
    };
    for _ in 1..ATTEMPTS {
        sleep(RETRY_PAUSE);
        if let Ok(done) = work() {
            return Ok(done);
        }
    }
    Err(first)
}

/// A call of the driver that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DriverError {
    call: &'static str,
    pub result: CUresult,
    /// The driver's name of the result, which lives as long as the driver.
    name: Option<&'static CStr>,
}

impl DriverError {
    pub fn new(call: &'static str, result: CUresult) -> Self {
        let mut name: *const c_char = null();
        // SAFETY: `name` is a local variable.
        unsafe { cuGetErrorName(result, &raw mut name) };
        // SAFETY: the driver's names are NUL-terminated and live as long as the driver, which is never unloaded.
        let name = (!name.is_null()).then(|| unsafe { CStr::from_ptr(name) });
        Self { call, result, name }
    }
}

impl Display for DriverError {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self { call, result, name } = self;
        match name {
            Some(name) => write!(f, "{call} failed with {} ({result})", name.to_string_lossy()),
            None => write!(f, "{call} failed with error {result}"),
        }
    }
}

impl Error for DriverError {}

/// # Errors
/// Every result but success.
pub(super) fn check(call: &'static str, result: CUresult) -> Result<(), DriverError> {
    if result == SUCCESS { Ok(()) } else { Err(DriverError::new(call, result)) }
}
