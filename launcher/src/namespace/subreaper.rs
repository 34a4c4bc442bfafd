//! Making the root of a tree that CRIU is restoring a subreaper before CRIU creates orphans.
//!
//! CRIU restores a process whose session leader is dead through a helper that exits, which makes the process an orphan as
//! before. But CRIU sets the root's "child subreaper" attribute only at the end of a restore. The init would adopt such
//! orphans, and the next dump would not contain them. So this module sets the attribute with ptrace at the stage
//! `setup-namespaces`, where the root waits for CRIU and has no children yet.

use std::io;

const PTRACE_ANY_CHILD: i32 = libc::__WALL;
/// The general registers (linux/elf.h).
const NT_PRSTATUS: libc::c_int = 1;

/// A traced and stopped process. Dropping this detaches from the process.
struct Traced {
    pid: i32,
}

fn check(result: libc::c_long) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn wait_stopped(pid: i32) -> io::Result<()> {
    let mut status = 0;
    loop {
        // SAFETY: `status` outlives the call.
        let waited = unsafe { libc::waitpid(pid, &raw mut status, PTRACE_ANY_CHILD) };
        if waited != -1 {
            break;
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
    if libc::WIFSTOPPED(status) { Ok(()) } else { Err(io::Error::other("the process ended")) }
}

fn io_vector(registers: *mut libc::user_regs_struct) -> libc::iovec {
    libc::iovec { iov_base: registers.cast(), iov_len: size_of::<libc::user_regs_struct>() }
}

#[cfg(target_arch = "x86_64")]
mod code {
    use std::io;

    /// The registers of a process that waits in a system call, changed so that its next instruction is this one.
    pub fn calling(
        pid: i32,
        before: libc::user_regs_struct,
        number: u64,
        arguments: [u64; 2],
    ) -> io::Result<libc::user_regs_struct> {
        // The system call in which it waits: `syscall`.
        let instruction = before.rip.wrapping_sub(2);
        // SAFETY: reads a word of the other process; an address that is not mapped there is an error, reported as -1.
        let word = unsafe { libc::ptrace(libc::PTRACE_PEEKTEXT, pid, instruction, 0) };
        if word.to_le_bytes()[..2] != [0x0f, 0x05] {
            return Err(io::Error::other("the process does not wait in a system call"));
        }
        let mut registers = before;
        registers.rip = instruction;
        registers.rax = number;
        // Not in a system call: the kernel must not restart the old one on the single step.
        registers.orig_rax = u64::MAX;
        [registers.rdi, registers.rsi] = arguments;
        (registers.rdx, registers.r10, registers.r8) = (0, 0, 0);
        Ok(registers)
    }

    pub fn result(registers: &libc::user_regs_struct) -> u64 {
        registers.rax
    }
}

#[cfg(target_arch = "aarch64")]
mod code {
    use crate::sys::path_text::read_maps;
    use procfs_core::process::MMapPath;
    use std::fs::File;
    use std::io;
    use std::os::unix::fs::FileExt;

    /// `svc #0`.
    const INSTRUCTION: [u8; 4] = 0xd400_0001_u32.to_le_bytes();

    /// The registers of a process that waits in a system call, changed so that its next instruction is this one.
    ///
    /// The kernel has set the program counter back to the instruction of the call in which it waits, and would restart
    /// that one if it were left there. So it is another `svc`, that of the vDSO.
    pub fn calling(
        pid: i32,
        before: libc::user_regs_struct,
        number: u64,
        arguments: [u64; 2],
    ) -> io::Result<libc::user_regs_struct> {
        let mut registers = before;
        registers.pc = system_call_of_vdso(pid)?;
        registers.regs[..2].copy_from_slice(&arguments);
        registers.regs[2..8].fill(0);
        registers.regs[8] = number;
        Ok(registers)
    }

    fn system_call_of_vdso(pid: i32) -> io::Result<u64> {
        let no_vdso = || io::Error::other("the process has no vDSO with a system call");
        let maps = read_maps(format!("/proc/{pid}/maps"))?;
        let vdso = maps.into_iter().find(|map| map.pathname == MMapPath::Vdso).ok_or_else(no_vdso)?;
        let (start, end) = vdso.address;
        let mut code = vec![0; (end - start) as usize];
        File::open(format!("/proc/{pid}/mem"))?.read_exact_at(&mut code, start)?;
        let at = code.chunks_exact(4).position(|instruction| instruction == INSTRUCTION);
        Ok(start + 4 * at.ok_or_else(no_vdso)? as u64)
    }

    pub fn result(registers: &libc::user_regs_struct) -> u64 {
        registers.regs[0]
    }
}

impl Traced {
    fn stop(pid: i32) -> io::Result<Self> {
        // SAFETY: no memory is handed over.
        check(unsafe { libc::ptrace(libc::PTRACE_SEIZE, pid, 0, 0) })?;
        let traced = Self { pid };
        // SAFETY: as above.
        check(unsafe { libc::ptrace(libc::PTRACE_INTERRUPT, pid, 0, 0) })?;
        wait_stopped(pid)?;
        Ok(traced)
    }

    fn registers(&self) -> io::Result<libc::user_regs_struct> {
        // SAFETY: plain integers, for which all zeroes is a value.
        let mut registers: libc::user_regs_struct = unsafe { std::mem::zeroed() };
        let mut into = io_vector(&raw mut registers);
        // SAFETY: the kernel fills in one `user_regs_struct`, and the length of it.
        check(unsafe { libc::ptrace(libc::PTRACE_GETREGSET, self.pid, NT_PRSTATUS, &raw mut into) })?;
        if into.iov_len != size_of::<libc::user_regs_struct>() {
            return Err(io::Error::other("the process has registers of another kind"));
        }
        Ok(registers)
    }

    fn set_registers(&self, registers: &libc::user_regs_struct) -> io::Result<()> {
        let mut from = io_vector((&raw const *registers).cast_mut());
        // SAFETY: the kernel reads one `user_regs_struct`, which outlives the call, and writes the length to `from`.
        check(unsafe { libc::ptrace(libc::PTRACE_SETREGSET, self.pid, NT_PRSTATUS, &raw mut from) })
    }

    /// Makes the process execute one system call instead of the one in which it waits, which is then restarted.
    fn call(&self, number: libc::c_long, first: u64, second: u64) -> io::Result<()> {
        let before = self.registers()?;
        self.set_registers(&code::calling(self.pid, before, number.cast_unsigned(), [first, second])?)?;
        // SAFETY: no memory is handed over.
        check(unsafe { libc::ptrace(libc::PTRACE_SINGLESTEP, self.pid, 0, 0) })?;
        wait_stopped(self.pid)?;
        let result = code::result(&self.registers()?).cast_signed();
        self.set_registers(&before)?;
        match result {
            0 => Ok(()),
            _ => Err(io::Error::from_raw_os_error(i32::try_from(-result).unwrap_or(libc::EIO))),
        }
    }
}

impl Drop for Traced {
    fn drop(&mut self) {
        // SAFETY: no memory is handed over. If the process has ended, the call fails without effect.
        unsafe { libc::ptrace(libc::PTRACE_DETACH, self.pid, 0, 0) };
    }
}

/// Gives the process `pid`, which waits in a system call, the "child subreaper" attribute.
pub(super) fn make_subreaper(pid: i32) -> io::Result<()> {
    let attribute = u64::try_from(libc::PR_SET_CHILD_SUBREAPER).map_err(io::Error::other)?;
    Traced::stop(pid)?.call(libc::SYS_prctl, attribute, 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader, Write};
    use std::process::{Command, Stdio};

    #[test]
    fn a_waiting_process_adopts_orphans() {
        // The orphan waits until its parent, whose number it gets, has ended.
        let orphan = r#"parent() { cut -d" " -f4 /proc/$$/stat; }
                        while [ "$(parent)" = "$1" ]; do sleep 0.01; done; parent"#;
        let mut shell = Command::new("/bin/sh");
        shell
            .args(["-c", r#"read x; echo on; sh -c 'sh -c "$1" orphan $$ &' parent "$1"; read y"#, "sh"])
            .arg(orphan);
        let mut child = shell.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let pid = child.id().cast_signed();
        let mut out = BufReader::new(child.stdout.take().unwrap()).lines();
        let waits = format!("/proc/{pid}/syscall");
        let read = format!("{} ", libc::SYS_read);
        while !std::fs::read_to_string(&waits).unwrap().starts_with(&read) {
            std::thread::yield_now();
        }
        make_subreaper(pid).unwrap();
        // The system call in which the shell waited was restarted: it still reads its input.
        let mut input = child.stdin.take().unwrap();
        input.write_all(b"go\n").unwrap();
        assert_eq!(out.next().unwrap().unwrap(), "on");
        assert_eq!(out.next().unwrap().unwrap().trim(), pid.to_string(), "the orphan's parent");
        input.write_all(b"end\n").unwrap();
        assert!(child.wait().unwrap().success());
    }
}
