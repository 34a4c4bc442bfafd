//! Calls of rarely used functions from hot functions.

/// Calls a function of one parameter, which has the type of its result, and leaves every register for integers as
/// it was but the result's: the parameters of the driver's call that is on its way stay where they are, and need
/// not be saved by those who do not come here.
///
/// `$function` is an `extern "C" fn($type) -> $type` that does not unwind, and is safe to call with `$value`; the type
/// is a pointer or an integer of its size.
macro_rules! cold_call {
    ($function:ident, $value:expr, $type:ty) => {{
        #[unsafe(naked)]
        unsafe extern "C" fn keeping_registers() {
            std::arch::naked_asm!(
                "push rbp",
                "mov rbp, rsp",
                "push rcx", "push rdx", "push rsi", "push rdi", "push r8", "push r9", "push r10", "push r11",
                // The compiler may come here before it has set up its own frame.
                "and rsp, -16",
                "mov rdi, rax",
                "call {function}",
                "lea rsp, [rbp - 64]",
                "pop r11", "pop r10", "pop r9", "pop r8", "pop rdi", "pop rsi", "pop rdx", "pop rcx",
                "pop rbp",
                "ret",
                function = sym $function,
            )
        }
        const { assert!(size_of::<$type>() == size_of::<usize>()) };
        let _: extern "C" fn($type) -> $type = $function;
        let mut value: $type = $value;
        // SAFETY: the function takes its parameter in RAX and leaves its result there; it keeps every other
        // register for integers, and those for floating-point numbers are named here. It pushes below the stack
        // pointer, as an asm block without `nostack` may. Whoever uses the macro vouches for the function.
        unsafe {
            std::arch::asm!(
                "call {function}",
                function = sym keeping_registers,
                inout("rax") value,
                out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _,
                out("xmm4") _, out("xmm5") _, out("xmm6") _, out("xmm7") _,
                out("xmm8") _, out("xmm9") _, out("xmm10") _, out("xmm11") _,
                out("xmm12") _, out("xmm13") _, out("xmm14") _, out("xmm15") _,
            );
        }
        value
    }};
}

pub(super) use cold_call;
