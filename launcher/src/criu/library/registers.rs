//! What the registers of a thread say of the system call that it is in.
//!
//! It is part of `entry.rs`, and of ckpt-run's unit tests.
//!
//! SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only

/// The general registers of a thread of x86-64, in the order of the kernel's `struct user_regs_struct`.
pub type Registers = [u64; 27];

pub const R10: usize = 7;
pub const R8: usize = 9;
pub const AX: usize = 10;
pub const DX: usize = 12;
pub const SI: usize = 13;
pub const DI: usize = 14;
pub const ORIG_AX: usize = 15;
pub const IP: usize = 16;
pub const CS: usize = 17;
pub const SP: usize = 19;

/// The code segment of 64-bit programs.
const CS_64: u64 = 0x33;

const EINTR: i64 = -4;
/// Results that only the kernel sees (its include/linux/errno.h): the call is made again, unless a signal handler runs
/// that was set without SA_RESTART, or any handler, or in any case.
const ERESTARTSYS: i64 = -512;
const ERESTARTNOINTR: i64 = -513;
const ERESTARTNOHAND: i64 = -514;
/// The same as ERESTARTNOHAND, with a time limit of which the kernel knows the rest.
const ERESTART_RESTARTBLOCK: i64 = -516;

const POLL: u64 = 7;
const NANOSLEEP: u64 = 35;
const FUTEX: u64 = 202;
const RESTART_SYSCALL: u64 = 219;
const CLOCK_NANOSLEEP: u64 = 230;
const SEMOP: u64 = 65;
const RT_SIGTIMEDWAIT: u64 = 128;
const IO_GETEVENTS: u64 = 208;
const SEMTIMEDOP: u64 = 220;
const EPOLL_WAIT: u64 = 232;
const EPOLL_PWAIT: u64 = 281;
const EPOLL_PWAIT2: u64 = 441;

/// `mov $NUMBER, %eax; syscall`.
pub const CODE_BYTES: usize = 7;
const MOVE_TO_EAX: u8 = 0xb8;
const SYSCALL: [u8; 2] = [0x0f, 0x05];

/// A thread that was stopped in a system call.
pub struct Interrupted {
    /// Its registers as the kernel has left them.
    kernels: Registers,
    /// The same before the call, or after it, with the result that the kernel would give it.
    told: Registers,
    /// The registers with which it goes on, if the kernel has lost the rest of the time limit.
    without_rest: Registers,
}

impl Interrupted {
    /// `None` if these are registers of a thread that is in no such call. `code` is what is before its next instruction.
    /// The kernel has `a_handler_waits` if it is about to call a signal handler.
    pub fn find(
        kernels: &Registers,
        code: impl FnOnce() -> Option<[u8; CODE_BYTES]>,
        a_handler_waits: impl Fn() -> bool,
    ) -> Option<Self> {
        let number = kernels[ORIG_AX];
        if kernels[CS] != CS_64 || (number as i64) < 0 {
            return None;
        }
        let new = |told, without_rest| Some(Self { kernels: *kernels, told, without_rest });
        match kernels[AX] as i64 {
            // The handler ends the call. For the others that depends on how it was set.
            ERESTARTNOHAND if a_handler_waits() => new(with(kernels, &[(AX, EINTR as u64)]), *kernels),
            ERESTARTSYS | ERESTARTNOINTR | ERESTARTNOHAND => new(before(kernels, number), *kernels),
            EINTR if !waits_without_limit(kernels) => None,
            EINTR | ERESTART_RESTARTBLOCK => {
                let ended = with(kernels, &[(AX, EINTR as u64)]);
                let Some(again) = code().and_then(|code| made_again(kernels, &code)) else {
                    return new(ended, ended);
                };
                let number = again[AX];
                let told = if a_handler_waits() { ended } else { again };
                let left = with(kernels, &[(AX, ERESTARTNOHAND as u64), (ORIG_AX, number)]);
                new(told, with(&left, &[(DI, again[DI]), (DX, again[DX])]))
            }
            _ => None,
        }
    }

    /// What CRIU is to take for the registers.
    pub fn for_criu(&self) -> &Registers {
        &self.told
    }

    /// Whether the call has ended for the kernel.
    pub fn has_ended(&self) -> bool {
        self.kernels[AX] as i64 == EINTR
    }

    /// Whether the thread has the registers that CRIU has taken for its own.
    pub fn was_restored(&self, now: &Registers) -> bool {
        [AX, IP, SP].iter().all(|&register| now[register] == self.told[register])
    }

    /// The registers with which the thread goes on: the kernel then ends the call or makes it again, as after any other
    /// stop. In a thread in which CRIU has run code until `rt_sigreturn`, the kernel `has_lost_rest` of a time limit: the
    /// call is made with the whole limit, and a sleep with what was left of it, if the program wants to know that.
    pub fn left(&self, has_lost_rest: impl FnOnce() -> bool) -> &Registers {
        match self.kernels[AX] as i64 {
            ERESTART_RESTARTBLOCK if !has_lost_rest() => &self.kernels,
            _ => &self.without_rest,
        }
    }
}

/// Whether the call waits without a time limit, and has done nothing when it returns EINTR. The kernel does not make it
/// again by itself. With a limit, the whole limit would begin again: the program gets EINTR then, as after any stop.
fn waits_without_limit(registers: &Registers) -> bool {
    match registers[ORIG_AX] {
        SEMOP => true,
        RT_SIGTIMEDWAIT => registers[DX] == 0,
        IO_GETEVENTS => registers[R8] == 0,
        SEMTIMEDOP | EPOLL_PWAIT2 => registers[R10] == 0,
        EPOLL_WAIT | EPOLL_PWAIT => (registers[R10] as i32) < 0,
        _ => false,
    }
}

fn with(registers: &Registers, changes: &[(usize, u64)]) -> Registers {
    let mut changed = *registers;
    for &(register, value) in changes {
        changed[register] = value;
    }
    changed
}

/// Before the call of this number.
fn before(registers: &Registers, number: u64) -> Registers {
    with(registers, &[(AX, number), (IP, registers[IP].wrapping_sub(SYSCALL.len() as u64))])
}

/// Before the call, which is made with what was left of its time limit. `None` if it is not known which call it was.
fn made_again(registers: &Registers, code: &[u8; CODE_BYTES]) -> Option<Registers> {
    if code[5..] != SYSCALL {
        return None;
    }
    let number = match registers[ORIG_AX] {
        // It was interrupted before: its number is in the code of the program only.
        RESTART_SYSCALL if code[0] == MOVE_TO_EAX => {
            u64::from(u32::from_le_bytes([code[1], code[2], code[3], code[4]]))
        }
        number => number,
    };
    let again = before(registers, number);
    // What was left of a sleep is where the program wants it.
    let rest = match number {
        NANOSLEEP => Some((DI, again[SI])),
        CLOCK_NANOSLEEP => Some((DX, again[R10])),
        POLL | FUTEX => None,
        _ if waits_without_limit(registers) => None,
        _ => return None,
    };
    Some(rest.filter(|&(_, left)| left != 0).map_or(again, |rest| with(&again, &[rest])))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    const NEXT: u64 = 0x7f00_1234_5680;
    const READ: u64 = 0;
    const PAUSE: u64 = 34;

    fn registers(result: i64, number: u64, others: &[(usize, u64)]) -> Registers {
        let plain =
            with(&[0; 27], &[(AX, result as u64), (ORIG_AX, number), (IP, NEXT), (CS, CS_64), (SP, 99)]);
        with(&plain, others)
    }

    fn code_of(call: u64) -> [u8; CODE_BYTES] {
        let [a, b, c, d] = (call as u32).to_le_bytes();
        [MOVE_TO_EAX, a, b, c, d, 0x0f, 0x05]
    }

    fn find(registers: &Registers, code: [u8; CODE_BYTES]) -> Option<Interrupted> {
        Interrupted::find(registers, || Some(code), || false)
    }

    /// What `compel_get_task_regs` of CRIU 4.2.1 makes of registers.
    fn as_criu(registers: &Registers) -> Registers {
        match registers[AX] as i64 {
            _ if (registers[ORIG_AX] as i64) < 0 => *registers,
            ERESTARTNOHAND | ERESTARTSYS | ERESTARTNOINTR => before(registers, registers[ORIG_AX]),
            ERESTART_RESTARTBLOCK => with(registers, &[(AX, EINTR as u64)]),
            _ => *registers,
        }
    }

    #[test]
    fn the_order_of_registers_is_the_kernels() {
        macro_rules! place {
            ($($name:ident)*) => { [$(offset_of!(libc::user_regs_struct, $name) / size_of::<u64>()),*] };
        }
        let kernels = place!(r10 r8 rax rdx rsi rdi orig_rax rip cs rsp);
        assert_eq!([R10, R8, AX, DX, SI, DI, ORIG_AX, IP, CS, SP], kernels);
        assert_eq!(size_of::<Registers>(), size_of::<libc::user_regs_struct>());
    }

    #[test]
    fn a_call_with_a_time_limit_is_made_again() {
        for call in [POLL, FUTEX, NANOSLEEP, CLOCK_NANOSLEEP] {
            for (number, code) in [(call, [0, 0, 0, 0, 0, 0x0f, 0x05]), (RESTART_SYSCALL, code_of(call))] {
                let kernels = registers(ERESTART_RESTARTBLOCK, number, &[(DI, 5), (DX, 6)]);
                let found = find(&kernels, code).unwrap();
                let saved = as_criu(found.for_criu());
                assert_eq!(saved, with(&kernels, &[(AX, call), (IP, NEXT - 2)]));
                assert!(found.was_restored(&saved));
                assert_eq!(found.left(|| false), &kernels, "the kernel knows the rest");
                let again = with(&kernels, &[(AX, ERESTARTNOHAND as u64), (ORIG_AX, call)]);
                assert_eq!(found.left(|| true), &again);
            }
        }
    }

    #[test]
    fn a_sleep_is_made_again_with_what_was_left() {
        for (call, limit, left) in [(NANOSLEEP, DI, SI), (CLOCK_NANOSLEEP, DX, R10)] {
            let kernels = registers(ERESTART_RESTARTBLOCK, call, &[(limit, 500), (left, 600)]);
            let found = find(&kernels, code_of(call)).unwrap();
            assert_eq!(found.for_criu()[limit], 600);
            assert!(!found.has_ended());
            assert_eq!(found.left(|| true)[limit], 600);
            assert_eq!(found.left(|| false)[limit], 500);
        }
    }

    #[test]
    fn the_kernel_decides_on_a_call_without_a_time_limit() {
        for result in [ERESTARTSYS, ERESTARTNOINTR, ERESTARTNOHAND] {
            let kernels = registers(result, READ, &[]);
            let found = find(&kernels, code_of(READ)).unwrap();
            let saved = as_criu(found.for_criu());
            assert_eq!(saved, with(&kernels, &[(AX, READ), (IP, NEXT - 2)]));
            assert!(found.was_restored(&saved));
            assert!([true, false].iter().all(|&is_leader| found.left(|| is_leader) == &kernels));
        }
    }

    #[test]
    fn a_call_that_has_done_nothing_is_made_again_unless_a_handler_runs() {
        let forever = u64::from(u32::MAX);
        let kernels = registers(EINTR, EPOLL_WAIT, &[(R10, forever)]);
        let found = find(&kernels, code_of(EPOLL_WAIT)).unwrap();
        assert_eq!(found.for_criu(), &with(&kernels, &[(AX, EPOLL_WAIT), (IP, NEXT - 2)]));
        assert_eq!(found.left(|| false), &with(&kernels, &[(AX, ERESTARTNOHAND as u64)]));
        assert!(found.has_ended());
        for (result, number) in [(EINTR, EPOLL_WAIT), (ERESTART_RESTARTBLOCK, POLL), (ERESTARTNOHAND, PAUSE)]
        {
            let kernels = registers(result, number, &[(R10, forever)]);
            let found = Interrupted::find(&kernels, || Some(code_of(number)), || true).unwrap();
            assert_eq!(as_criu(found.for_criu()), with(&kernels, &[(AX, EINTR as u64)]), "the image");
            assert!(found.was_restored(&as_criu(found.for_criu())));
            assert_eq!(
                found.left(|| true)[AX] as i64,
                ERESTARTNOHAND,
                "the kernel decides in the job that goes on"
            );
        }
    }

    #[test]
    fn an_unknown_call_with_a_time_limit_ends_as_in_criu() {
        let unknown =
            [(RESTART_SYSCALL, [0; CODE_BYTES]), (RESTART_SYSCALL, code_of(250)), (250, code_of(250))];
        for (number, code) in unknown {
            let kernels = registers(ERESTART_RESTARTBLOCK, number, &[]);
            let found = find(&kernels, code).unwrap();
            let ended = with(&kernels, &[(AX, EINTR as u64)]);
            assert_eq!([as_criu(found.for_criu()), *found.left(|| true)], [ended, ended]);
            assert_eq!(found.left(|| false), &kernels);
        }
    }

    #[test]
    fn others_stay() {
        const CLOSE: u64 = 3;
        for kernels in [
            registers(EINTR, CLOSE, &[]),
            registers(EINTR, EPOLL_WAIT, &[(R10, 5000)]),
            registers(EINTR, SEMTIMEDOP, &[(R10, 0x7f00)]),
            registers(EINTR, RT_SIGTIMEDWAIT, &[(DX, 0x7f00)]),
            registers(0, POLL, &[]),
            registers(EINTR, u64::MAX, &[]),
            registers(ERESTARTSYS, READ, &[(CS, 0x23)]),
        ] {
            assert!(find(&kernels, code_of(POLL)).is_none(), "{kernels:?}");
        }
        let found = find(&registers(ERESTARTSYS, READ, &[]), code_of(READ)).unwrap();
        let others = registers(READ as i64, READ, &[(IP, NEXT - 2), (SP, 98)]);
        assert!(!found.was_restored(&others), "another stack");
    }
}
