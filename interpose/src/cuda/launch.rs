//! cuLaunchKernel through the open gate.
//!
//! A launch has eleven parameters, five of them on the stack, where the driver needs a copy of them below our own frame.
//! The compiler takes 40 instructions for that, and these are 24. They do what [`enter`](super::gate::enter), the
//! call and [`observe`](super::sticky::observe) do, and no more than that: where anything else is to be done, the compiled
//! function does everything, from the beginning.

/// Defines the exported function `$symbol`, whose compiled form is `$any`.
macro_rules! through_open_gate {
    ($symbol:ident, $any:ident) => {
        #[doc = concat!("In front of the driver's `", stringify!($symbol), "`.")]
        ///
        /// # Safety
        /// As for the driver's.
        #[cfg_attr(not(test), unsafe(no_mangle))]
        #[unsafe(naked)]
        pub unsafe extern "C" fn $symbol() {
            std::arch::naked_asm!(
                ".cfi_startproc",
                // The driver's function, unless it is not known yet or absent.
                "mov rax, qword ptr [rip + {real} + {offset}]",
                "cmp rax, {absent}",
                "jbe 2f",
                // The thread's slot, unless it has none yet.
                "mov r11, qword ptr [rip + ckpt_gate_slot@GOTTPOFF]",
                "mov r11, qword ptr fs:[r11]",
                "test r11, r11",
                "je 2f",
                // Inside, unless the gate is not open. This thread alone writes to its slot.
                "add qword ptr [r11], {entered}",
                "cmp dword ptr [rip + {gate}], 0",
                "jne 3f",
                // The slot, for the way out, and what aligns the stack.
                "push r11",
                ".cfi_adjust_cfa_offset 8",
                "sub rsp, 8",
                ".cfi_adjust_cfa_offset 8",
                // The parameters that are on the stack, the last one first: each is as far away as the one before.
                "push qword ptr [rsp + 56]",
                ".cfi_adjust_cfa_offset 8",
                "push qword ptr [rsp + 56]",
                ".cfi_adjust_cfa_offset 8",
                "push qword ptr [rsp + 56]",
                ".cfi_adjust_cfa_offset 8",
                "push qword ptr [rsp + 56]",
                ".cfi_adjust_cfa_offset 8",
                "push qword ptr [rsp + 56]",
                ".cfi_adjust_cfa_offset 8",
                "call rax",
                "add rsp, 48",
                ".cfi_adjust_cfa_offset -48",
                "pop r11",
                ".cfi_adjust_cfa_offset -8",
                // Outside. Every store of this processor is a release.
                "sub qword ptr [r11], {inside}",
                "cmp eax, {lowest}",
                "jae 4f",
                "ret",
                "3:",
                "sub qword ptr [r11], {entered}",
                "2:",
                "jmp {any}",
                "4:",
                "mov edi, eax",
                "jmp {inspect}",
                ".cfi_endproc",
                real = sym real::REAL,
                offset = const Index::$symbol as usize * size_of::<usize>(),
                absent = const real::ABSENT_ADDRESS,
                gate = sym gate::GATE,
                entered = const gate::ENTERED,
                inside = const gate::INSIDE_ONCE,
                lowest = const sticky::LOWEST,
                any = sym $any,
                inspect = sym sticky::inspect,
            )
        }
    };
}

pub(super) use through_open_gate;
