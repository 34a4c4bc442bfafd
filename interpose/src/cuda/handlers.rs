//! What is done with a call beside passing it on. Each handler gets the driver's function and the parameters; a
//! call without one is passed on.

mod passed {
    use cuda_abi::types::*;

    macro_rules! pass {
        ($( fn $name:ident ( $($arg:ident : $ty:ty),* $(,)? ) = $public:literal since $since:literal, $class:ident
            $(, per_thread $per_thread:ident since $per_thread_since:literal)? ; )*
         $( legacy $legacy:ident = $legacy_public:literal since $legacy_since:literal ; )*) => {
            $(
                #[allow(dead_code, reason = "a handler below takes its place")]
                #[inline(always)]
                pub(in crate::cuda) unsafe fn $name(
                    real: unsafe extern "C" fn($($ty),*) -> CUresult,
                    $($arg: $ty),*
                ) -> CUresult {
                    // SAFETY: the parameters are those of our own caller.
                    unsafe { real($($arg),*) }
                }
            )*
        };
    }

    cuda_abi::entry_points!(pass);
}

// A name that is imported by name goes before one that comes by the glob.
pub(super) use passed::*;

pub(super) use super::proc_address::{cuGetExportTable, cuGetProcAddress, cuGetProcAddress_v2};
pub(super) use super::track::{
    cuInit, cuStreamBeginCapture, cuStreamBeginCapture_v2, cuStreamBeginCaptureToGraph, cuStreamEndCapture,
};
