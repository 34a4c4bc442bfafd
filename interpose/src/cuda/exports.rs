//! The exported functions, one for each row of the table of entry points. Each calls the driver's function.

use std::ffi::c_void;

use cuda_abi::sys;
use cuda_abi::types::*;

use super::entry_points::{COUNT, Index};
use super::{gate, handlers, launch, real, sticky, taint};

/// What a call answers that reaches us although no driver is loaded.
const NO_DRIVER: CUresult = sys::CUresult::CUDA_ERROR_NOT_INITIALIZED as CUresult;

macro_rules! export {
    ($( fn $name:ident $params:tt = $public:literal since $since:literal, $class:ident
        $(, per_thread $per_thread:ident since $per_thread_since:literal)? ; )*
     $( legacy $legacy:ident = $legacy_public:literal since $legacy_since:literal ; )*) => {
        static ADDRESSES: [Address; COUNT] = [
            $( Address($name as *const c_void), $( Address($per_thread as *const c_void), )? )*
            $( Address($legacy as *const c_void), )*
        ];

        $(
            function!($name, $name, $params, $class);
            $( function!($per_thread, $name, $params, $class); )?
        )*
        $( untyped!($legacy); )*
    };
}

/// A function in front of the driver's. What is done with the call is the table's class, and for what is
/// virtualised or tracked the handler of its name.
macro_rules! function {
    (cuLaunchKernel, $($rest:tt)*) => { launch!(cuLaunchKernel, any_launch, $($rest)*); };
    (cuLaunchKernel_ptsz, $($rest:tt)*) => { launch!(cuLaunchKernel_ptsz, any_launch_ptsz, $($rest)*); };
    ($symbol:ident, $($rest:tt)*) => {
        compiled!(
            #[doc = concat!("In front of the driver's `", stringify!($symbol), "`.")]
            ///
            /// # Safety
            /// As for the driver's.
            #[cfg_attr(not(test), unsafe(no_mangle))]
            pub $symbol, $symbol, $($rest)*
        );
    };
}

/// A launch: written in instructions for an open gate, and compiled as `$any` for every other case.
macro_rules! launch {
    ($symbol:ident, $any:ident, $($rest:tt)*) => {
        launch::through_open_gate!($symbol, $any);
        compiled!($any, $symbol, $($rest)*);
    };
}

macro_rules! compiled {
    ($(#[$attribute:meta])* $vis:vis $name:ident, $symbol:ident, $row:ident, ( $($arg:ident : $ty:ty),* $(,)? ),
     $class:ident) => {
        $(#[$attribute])*
        $vis unsafe extern "C" fn $name($($arg: $ty),*) -> CUresult {
            type Function = unsafe extern "C" fn($($ty),*) -> CUresult;
            let address = real::address(Index::$symbol as usize);
            if address.is_null() {
                return NO_DRIVER;
            }
            // SAFETY: the address is that of the driver's symbol, which has the type that the table says.
            let real: Function = unsafe { std::mem::transmute::<*const c_void, Function>(address) };
            by_class!($class, $row, $symbol, real, ($($arg),*))
        }
    };
}

macro_rules! by_class {
    (leave, $row:ident, $symbol:ident, $real:ident, ($($arg:ident),*)) => {
        // SAFETY: the parameters are those of our own caller.
        sticky::observe(unsafe { handlers::$row($real, $($arg),*) })
    };
    (taint, $row:ident, $symbol:ident, $real:ident, ($($arg:ident),*)) => {{
        let _inside = gate::enter_busy();
        // SAFETY: the parameters are those of our own caller.
        let result = unsafe { handlers::$row($real, $($arg),*) };
        taint::mark(stringify!($symbol), result);
        sticky::observe(result)
    }};
    (track, $row:ident, $symbol:ident, $real:ident, ($($arg:ident),*)) => {{
        // Compiles modules, pins memory.
        let _inside = gate::enter_busy();
        // SAFETY: the parameters are those of our own caller.
        sticky::observe(unsafe { handlers::$row($real, $($arg),*) })
    }};
    ($class:ident, $row:ident, $symbol:ident, $real:ident, ($($arg:ident),*)) => {{
        let _inside = gate::enter();
        // SAFETY: the parameters are those of our own caller.
        sticky::observe(unsafe { handlers::$row($real, $($arg),*) })
    }};
}

/// A symbol without a signature: whatever was passed is passed on, by a jump, and the process is tainted. It waits at
/// a closed gate; that it is on its way through an open one nobody sees, for it does not come back to us, but by then
/// it is marked.
macro_rules! untyped {
    ($symbol:ident) => {
        #[doc = concat!("In front of the driver's `", stringify!($symbol), "`.")]
        ///
        /// # Safety
        /// As for the driver's.
        #[cfg_attr(not(test), unsafe(no_mangle))]
        #[unsafe(naked)]
        pub unsafe extern "C" fn $symbol() {
            extern "C" fn pass() -> *const c_void {
                let _inside = gate::enter();
                taint::mark_untyped(stringify!($symbol));
                let address = real::address(Index::$symbol as usize);
                if address.is_null() { no_driver as *const c_void } else { address }
            }
            // The six integer parameters are kept over the call, and the stack is aligned by a seventh push.
            // None of these functions takes floating-point parameters in registers that `pass` would spoil.
            std::arch::naked_asm!(
                "push rdi", "push rsi", "push rdx", "push rcx", "push r8", "push r9", "push rax",
                "call {pass}",
                "mov r11, rax",
                "pop rax", "pop r9", "pop r8", "pop rcx", "pop rdx", "pop rsi", "pop rdi",
                "jmp r11",
                pass = sym pass,
            )
        }
    };
}

extern "C" fn no_driver() -> CUresult {
    NO_DRIVER
}

cuda_abi::entry_points!(export);

/// The address of a function: nothing is ever read through it.
struct Address(*const c_void);

// SAFETY: it is only used as a number.
unsafe impl Sync for Address {}

/// Our function of an index.
pub(super) fn address(index: usize) -> *const c_void {
    ADDRESSES[index].0
}
