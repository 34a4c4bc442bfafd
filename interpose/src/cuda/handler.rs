//! The signature of handlers.

/// Defines handlers of the driver's calls, each a function as [`exports`](super::exports) calls it: with the driver's
/// function and the program's parameters.
///
/// ```text
/// fn NAME(PARAMETER: TYPE, …) |CALL| { … }
/// fn NAME(PARAMETER: TYPE, …) |CALL, REAL| { … }
/// ```
///
/// `CALL()` calls the driver with the program's parameters. `REAL` is the driver's function, for other parameters.
macro_rules! handlers {
    ($( $(#[$attribute:meta])*
        fn $name:ident ( $($arg:ident : $ty:ty),* ) |$call:pat_param $(, $real:ident)?| $body:block )*) => {
        $(
            $(#[$attribute])*
            ///
            /// # Safety
            /// As for the driver's.
            pub(crate) unsafe fn $name(
                function: unsafe extern "C" fn($($ty),*) -> cuda_abi::types::CUresult,
                $($arg: $ty),*
            ) -> cuda_abi::types::CUresult {
                $( let $real = function; )?
                // SAFETY: the parameters are those of our own caller.
                let $call = move || unsafe { function($($arg),*) };
                $body
            }
        )*
    };
}

pub(crate) use handlers;
