//! A fix for system calls that CRIU ends with EINTR. The kernel restarts `poll`, `nanosleep`, `clock_nanosleep` and `futex`
//! with a timeout by themselves when a task was stopped: programs never see EINTR from them without a signal handler, and
//! many do not expect it (PyTorch's TCPStore raises "Interrupted system call"). What the kernel needs for that is not
//! in a dump, so CRIU 4.2.1 has the call return EINTR after a restore (compel's `compel_get_task_regs`).
//!
//! This module has the thread make the call once more: with the whole timeout, and for a sleep with what was left of it,
//! which the kernel has stored for the caller. If the call had been interrupted before, such as by an earlier checkpoint,
//! the kernel's number of it is that of `restart_syscall`; the number is then taken from the code of the program.
//!
//! Registers are changed in place in `core-*.img` (field numbers: CRIU's images/core.proto, core-x86.proto). Only x86-64:
//! on arm64 the first argument of the call is not in the image.

use super::fields::{Field, HEADER_BYTES, fields};
use crate::files::staging::StagedDir;
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

const MACHINE: u64 = 1;
const X86_64: u64 = 1;
const THREAD: u64 = 2;
const REGISTERS: u64 = 2;

const R10: u64 = 8;
const AX: u64 = 11;
const DX: u64 = 13;
const SI: u64 = 14;
const DI: u64 = 15;
const ORIG_AX: u64 = 16;
const IP: u64 = 17;
const CS: u64 = 18;

/// The code segment of 64-bit programs.
const CS_64: u64 = 0x33;
/// -EINTR.
const INTERRUPTED: u64 = 4_u64.wrapping_neg();
const POLL: u64 = 7;
const NANOSLEEP: u64 = 35;
const FUTEX: u64 = 202;
const RESTART: u64 = 219;
const CLOCK_NANOSLEEP: u64 = 230;
/// FUTEX_WAIT, FUTEX_WAIT_BITSET, and the bits of a futex operation that say which it is.
const FUTEX_WAITS: [u64; 2] = [0, 9];
const FUTEX_OPERATION: u64 = 0x7f;
/// `mov $NUMBER, %eax; syscall`.
const CODE_BYTES: usize = 7;
const MOVE_TO_EAX: u8 = 0xb8;
const SYSCALL: [u8; 2] = [0x0f, 0x05];

/// Has the threads in `images` make their interrupted calls again. They are frozen; `proc` is their /proc. Returns how many
/// there are.
///
/// # Errors
/// When an image cannot be read or changed.
pub fn restart_calls(images: &StagedDir, proc: &Path) -> io::Result<usize> {
    let mut restarted = 0;
    for (name, _) in images.files()? {
        let Some(thread) = name.strip_prefix("core-").and_then(|rest| rest.strip_suffix(".img")) else {
            continue;
        };
        let Some(image) = images.read(&name)? else { continue };
        let thread = proc.join(thread);
        let changes = Registers::find(&image)
            .filter(Registers::is_interrupted)
            .filter(|_| !has_pending_signal(&thread))
            .and_then(|registers| registers.restarted(&code(&thread, registers.value(IP))?));
        let Some(changes) = changes else { continue };
        let file = images.change(&name)?;
        for (range, value) in changes {
            file.write_all_at(&padded(value, range.len()), range.start as u64)?;
        }
        restarted += 1;
    }
    Ok(restarted)
}

/// The general registers of a thread, with the places of their values in the image.
struct Registers(Vec<(u64, u64, Range<usize>)>);

impl Registers {
    /// `None` if the image has none of this architecture.
    fn find(image: &[u8]) -> Option<Self> {
        let length = image.get(HEADER_BYTES..HEADER_BYTES + 4)?;
        let start = HEADER_BYTES + 4;
        let length = u32::from_le_bytes(length.try_into().ok()?) as usize;
        let core = fields(image, start..start.checked_add(length)?)?;
        let is_x86 = |(number, field): &(u64, Field)| {
            *number == MACHINE && matches!(field, Field::Number { value: X86_64, .. })
        };
        core.iter().find(|field| is_x86(field))?;
        let thread = fields(image, bytes(core, THREAD)?)?;
        let registers = fields(image, bytes(thread, REGISTERS)?)?;
        let number = |(number, field)| match field {
            Field::Number { value, bytes } => Some((number, value, bytes)),
            _ => None,
        };
        Some(Self(registers.into_iter().filter_map(number).collect()))
    }

    fn value(&self, register: u64) -> u64 {
        self.0.iter().find(|(number, ..)| *number == register).map_or(0, |(_, value, _)| *value)
    }

    /// Whether a call of `futex` with these registers waits.
    fn is_futex_wait(&self) -> bool {
        FUTEX_WAITS.contains(&(self.value(SI) & FUTEX_OPERATION))
    }

    /// Whether the thread is in a call that CRIU has return EINTR, and that the kernel never has return it.
    fn is_interrupted(&self) -> bool {
        let is_known = match self.value(ORIG_AX) {
            POLL | NANOSLEEP | CLOCK_NANOSLEEP | RESTART => true,
            FUTEX => self.is_futex_wait(),
            _ => false,
        };
        is_known && self.value(AX) == INTERRUPTED && self.value(CS) == CS_64
    }

    /// New values, with their places, for a thread that has this code before its next instruction. `None` if the call is not
    /// known, or a value does not fit into its place.
    fn restarted(&self, code: &[u8; CODE_BYTES]) -> Option<Vec<(Range<usize>, u64)>> {
        if code[5..] != SYSCALL {
            return None;
        }
        let call = match self.value(ORIG_AX) {
            RESTART if code[0] == MOVE_TO_EAX => u64::from(u32::from_le_bytes(code[1..5].try_into().ok()?)),
            RESTART => return None,
            call => call,
        };
        let mut changes = vec![(AX, call), (IP, self.value(IP).checked_sub(SYSCALL.len() as u64)?)];
        // What was left of a sleep, if the program wants to know it.
        match call {
            POLL => {}
            FUTEX if self.is_futex_wait() => {}
            NANOSLEEP => changes.extend(Some((DI, self.value(SI))).filter(|(_, left)| *left != 0)),
            CLOCK_NANOSLEEP => changes.extend(Some((DX, self.value(R10))).filter(|(_, left)| *left != 0)),
            _ => return None,
        }
        let place = |(register, value): (u64, u64)| {
            let (_, _, range) = self.0.iter().find(|(number, ..)| *number == register)?;
            let bits = u64::BITS - value.leading_zeros();
            (bits as usize <= 7 * range.len()).then(|| (range.clone(), value))
        };
        changes.into_iter().map(place).collect()
    }
}

fn bytes(fields: Vec<(u64, Field)>, wanted: u64) -> Option<Range<usize>> {
    fields.into_iter().find_map(|(number, field)| match field {
        Field::Bytes(range) if number == wanted => Some(range),
        _ => None,
    })
}

/// A number of protobuf with this length: leading zeroes are allowed.
fn padded(value: u64, length: usize) -> Vec<u8> {
    let mut rest = value;
    let byte = |at| {
        let seven = (rest & 0x7f) as u8;
        rest >>= 7;
        if at + 1 < length { seven | 0x80 } else { seven }
    };
    (0..length).map(byte).collect()
}

/// Whether a signal waits for the thread for which there is a handler: the call ends with EINTR then, as it should.
fn has_pending_signal(thread: &Path) -> bool {
    let Ok(status) = fs::read_to_string(thread.join("status")) else { return true };
    let mask = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|line| u64::from_str_radix(line.trim(), 16).ok()).unwrap_or(0)
    };
    (mask("SigPnd:") | mask("ShdPnd:")) & mask("SigCgt:") & !mask("SigBlk:") != 0
}

/// What is before the thread's next instruction.
fn code(thread: &Path, next: u64) -> Option<[u8; CODE_BYTES]> {
    let mut code = [0; CODE_BYTES];
    let memory = File::open(thread.join("mem")).ok()?;
    memory.read_exact_at(&mut code, next.checked_sub(CODE_BYTES as u64)?).ok()?;
    Some(code)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEXT: u64 = 0x7f00_1234_5680;

    fn number(to: &mut Vec<u8>, field: u64, value: u64) {
        to.push((field << 3) as u8 & 0x7f | if field > 15 { 0x80 } else { 0 });
        if field > 15 {
            to.push((field >> 4) as u8);
        }
        let bits = 64 - (value | 1).leading_zeros();
        to.extend(padded(value, bits.div_ceil(7) as usize));
    }

    fn message(field: u8, content: &[u8]) -> Vec<u8> {
        [&[field << 3 | 2, content.len() as u8], content].concat()
    }

    fn image(registers: &[(u64, u64)]) -> Vec<u8> {
        let mut all = Vec::new();
        let fixed = [(AX, INTERRUPTED), (IP, NEXT), (CS, CS_64)];
        let given =
            |wanted: u64| registers.iter().find(|(number, _)| *number == wanted).map(|(_, value)| *value);
        for field in [R10, AX, DX, SI, DI, ORIG_AX, IP, CS] {
            let usual = fixed.iter().find(|(number, _)| *number == field).map_or(0, |(_, value)| *value);
            number(&mut all, field, given(field).unwrap_or(usual));
        }
        let core = [&[8, 1], &message(2, &message(2, &all))[..]].concat();
        [&[0; HEADER_BYTES], &(core.len() as u32).to_le_bytes()[..], &core].concat()
    }

    fn code_of(call: u32) -> [u8; CODE_BYTES] {
        let [a, b, c, d] = call.to_le_bytes();
        [MOVE_TO_EAX, a, b, c, d, 0x0f, 0x05]
    }

    /// The registers after the change.
    fn changed(registers: &[(u64, u64)], code: [u8; CODE_BYTES]) -> Option<Registers> {
        let mut image = image(registers);
        let found = Registers::find(&image).unwrap();
        let changes = found.is_interrupted().then(|| found.restarted(&code)).flatten()?;
        for (range, value) in changes {
            let bytes = padded(value, range.len());
            image[range].copy_from_slice(&bytes);
        }
        Registers::find(&image)
    }

    #[test]
    fn an_interrupted_call_is_made_again() {
        for (call, arguments) in [(POLL, vec![]), (FUTEX, vec![(SI, 0x89)]), (NANOSLEEP, vec![(DI, 500)])] {
            let with = |number| [&[(ORIG_AX, number)], &arguments[..]].concat();
            for (number, code) in [(call, [0, 0, 0, 0, 0, 0x0f, 0x05]), (RESTART, code_of(call as u32))] {
                let after = changed(&with(number), code).unwrap();
                assert_eq!((after.value(AX), after.value(IP)), (call, NEXT - 2), "{call}");
                assert_eq!(after.value(ORIG_AX), number);
            }
        }
        let after = changed(&[(ORIG_AX, NANOSLEEP), (DI, 500), (SI, 600)], code_of(35)).unwrap();
        assert_eq!(after.value(DI), 600, "what was left");
        let after = changed(&[(ORIG_AX, CLOCK_NANOSLEEP), (DX, 500), (R10, 600)], code_of(230)).unwrap();
        assert_eq!(after.value(DX), 600);
    }

    #[test]
    fn others_stay() {
        let plain = code_of(7);
        let stays: [&[(u64, u64)]; 6] = [
            &[(ORIG_AX, 232)],
            &[(ORIG_AX, POLL), (AX, 0)],
            &[(ORIG_AX, POLL), (CS, 0x23)],
            &[(ORIG_AX, FUTEX), (SI, 0x86)],
            // What was left does not fit into the place.
            &[(ORIG_AX, NANOSLEEP), (DI, 5), (SI, 600)],
            &[(ORIG_AX, u64::MAX)],
        ];
        for registers in stays {
            assert!(changed(registers, plain).is_none(), "{registers:?}");
        }
        for code in [[0; CODE_BYTES], code_of(232), [0, 7, 0, 0, 0, 0x0f, 0x05], code_of(219)] {
            assert!(changed(&[(ORIG_AX, RESTART)], code).is_none(), "{code:?}");
        }
    }

    #[test]
    fn any_image_is_read_or_left_out() {
        let whole = image(&[(ORIG_AX, POLL)]);
        ckpt_test_mutate::mutations(&[whole], |bytes| {
            if let Some(registers) = Registers::find(bytes) {
                let _ = registers.restarted(&code_of(7));
            }
        });
    }
}
