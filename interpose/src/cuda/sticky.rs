//! Sticky errors: once a kernel has corrupted its context or the device has failed, every call in the context returns
//! that error (CUDA driver API reference, `CUresult`: "any further CUDA work will return the same error").
//!
//! Calls that we serve without the driver have to fail likewise. So each result of the program's calls is inspected;
//! after such an error the driver is asked before a call is served.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use cuda_abi::sys::CUresult as Error;
use cuda_abi::types::CUresult;

use super::activity;

/// The sticky errors of the reference, and the driver's error for unknown problems.
const ERRORS: [Error; 14] = [
    Error::CUDA_ERROR_ECC_UNCORRECTABLE,
    Error::CUDA_ERROR_NVLINK_UNCORRECTABLE,
    Error::CUDA_ERROR_CONTAINED,
    Error::CUDA_ERROR_ILLEGAL_ADDRESS,
    Error::CUDA_ERROR_LAUNCH_TIMEOUT,
    Error::CUDA_ERROR_ASSERT,
    Error::CUDA_ERROR_HARDWARE_STACK_ERROR,
    Error::CUDA_ERROR_ILLEGAL_INSTRUCTION,
    Error::CUDA_ERROR_MISALIGNED_ADDRESS,
    Error::CUDA_ERROR_INVALID_ADDRESS_SPACE,
    Error::CUDA_ERROR_INVALID_PC,
    Error::CUDA_ERROR_LAUNCH_FAILED,
    Error::CUDA_ERROR_TENSOR_MEMORY_LEAK,
    Error::CUDA_ERROR_UNKNOWN,
];

/// Below it there is none of them: the one comparison that every call pays.
pub(super) const LOWEST: CUresult = 200;

/// Whether the program has received such an error. It is never reset: other contexts may work, so the driver is asked
/// each time.
static WAS_TOLD: AtomicBool = AtomicBool::new(false);

/// Inspects the result of the program's call and returns it.
#[inline(always)]
pub(super) fn observe(result: CUresult) -> CUresult {
    if result < LOWEST { result } else { inspect(result) }
}

#[cold]
#[inline(never)]
pub(super) extern "C" fn inspect(result: CUresult) -> CUresult {
    if result == Error::CUDA_ERROR_NOT_READY as CUresult {
        activity::not_ready();
    }
    if is_one(result) {
        WAS_TOLD.store(true, Relaxed);
    }
    // A compiler that knows that it is what came in keeps that in a register of its own, which every call would pay
    // for.
    std::hint::black_box(result)
}

pub(super) fn is_one(result: CUresult) -> bool {
    ERRORS.iter().any(|error| *error as CUresult == result)
}

/// Whether a context may be corrupted.
pub(super) fn is_suspected() -> bool {
    WAS_TOLD.load(Relaxed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_of_them_is_seen_and_no_other() {
        for error in ERRORS {
            assert!(error as CUresult >= LOWEST && is_one(error as CUresult), "{error:?}");
        }
        for other in
            [Error::CUDA_SUCCESS, Error::CUDA_ERROR_NOT_READY, Error::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED]
        {
            assert_eq!(observe(other as CUresult), other as CUresult);
            assert!(!is_suspected(), "{other:?}");
        }
        let error = Error::CUDA_ERROR_ASSERT as CUresult;
        assert_eq!(observe(error), error);
        assert!(is_suspected());
    }
}
