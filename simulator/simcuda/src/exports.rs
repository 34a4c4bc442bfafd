//! The exported symbols, one for each row of the table.

use cuda_abi::Class;
use cuda_abi::types::*;

use crate::{dispatch, entry};

macro_rules! export {
    ($( fn $name:ident $params:tt = $public:literal since $since:literal, $class:ident
        $(, per_thread $per_thread:ident since $per_thread_since:literal)? ; )*
     $( legacy $legacy:ident = $legacy_public:literal since $legacy_since:literal ; )*) => {
        $(
            function!($name, $name, $params, $since, $class, false);
            $( function!($per_thread, $name, $params, $per_thread_since, $class, true); )?
        )*
        $(
            #[cfg_attr(not(test), unsafe(no_mangle))]
            unsafe extern "C" fn $legacy() -> CUresult {
                let refuse = || Err(cuda_abi::sys::CUresult::CUDA_ERROR_NOT_SUPPORTED);
                entry::call(stringify!($legacy), $legacy_since, Class::Taint, false, refuse)
            }
        )*

        /// The address of an exported symbol.
        pub(crate) fn address(symbol: &str) -> Option<*const c_void> {
            Some(match symbol {
                $(
                    stringify!($name) => $name as *const c_void,
                    $( stringify!($per_thread) => $per_thread as *const c_void, )?
                )*
                $( stringify!($legacy) => $legacy as *const c_void, )*
                _ => return None,
            })
        }
    };
}

/// One exported function.
macro_rules! function {
    ($symbol:ident, $handler:ident, ( $($arg:ident : $ty:ty),* $(,)? ), $since:literal, $class:ident,
        $per_thread:literal) => {
        #[cfg_attr(not(test), unsafe(no_mangle))]
        unsafe extern "C" fn $symbol($($arg: $ty),*) -> CUresult {
            entry::call(stringify!($symbol), $since, cuda_abi::class!($class), $per_thread, || {
                // SAFETY: the handler asks of its caller what the entry point asks of its own.
                unsafe { dispatch::$handler($($arg),*) }
            })
        }
    };
}

cuda_abi::entry_points!(export);
