//! Calls of the driver by ourselves: they pass neither the gate nor a handler.

use std::ffi::c_void;

use cuda_abi::types::*;

use super::exports::Index;
use super::real;

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
