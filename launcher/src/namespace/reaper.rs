//! The reaper: the root of the dumped tree, a process that only waits. It adopts orphans, so that a daemonised child stays
//! in the tree that CRIU dumps, and ends with the command's exit code.
//!
//! The reaper is in every snapshot, so it must not depend on the file of this program still existing unchanged years later.
//! It is executed from a file of a few hundred bytes that is unlinked immediately, and that CRIU therefore stores in the
//! snapshot. Hence it is machine code that maps one page, without libc and heap.

use std::io;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

#[cfg(target_arch = "x86_64")]
mod code {
    // wait4(-1, &status, 0, NULL) until it returns the command's PID; exit_group with its code, 128 + n for signal n. Any
    // other child is an adopted orphan, which has to be reaped here. ECHILD cannot happen before the command was reaped; if
    // it does nevertheless, the exit code is 255, to avoid an endless loop.
    std::arch::global_asm!(
        ".pushsection .rodata.ckpt_reaper, \"a\"",
        ".globl ckpt_reaper_start",
        ".globl ckpt_reaper_end",
        "ckpt_reaper_start:",
        "  sub rsp, 16",
        "2:",
        "  mov eax, 61",
        "  mov rdi, -1",
        "  mov rsi, rsp",
        "  xor edx, edx",
        "  xor r10d, r10d",
        "  syscall",
        "  cmp eax, dword ptr [rip + 6f]",
        "  je 3f",
        "  cmp eax, -10",
        "  jne 2b",
        "  mov edi, 255",
        "  jmp 5f",
        "3:",
        "  mov ecx, dword ptr [rsp]",
        "  mov edi, ecx",
        "  and edi, 127",
        "  jz 4f",
        "  add edi, 128",
        "  jmp 5f",
        "4:",
        "  shr ecx, 8",
        "  mov edi, ecx",
        "  and edi, 255",
        "5:",
        "  mov eax, 231",
        "  syscall",
        "  ud2",
        "  .balign 4",
        "6:",
        "  .long 0",
        "ckpt_reaper_end:",
        ".popsection",
    );
    /// The architecture's number in an ELF header: `EM_X86_64`.
    pub const MACHINE: u16 = 62;
}

#[cfg(target_arch = "aarch64")]
mod code {
    // As above.
    std::arch::global_asm!(
        ".pushsection .rodata.ckpt_reaper, \"a\"",
        ".globl ckpt_reaper_start",
        ".globl ckpt_reaper_end",
        ".balign 4",
        "ckpt_reaper_start:",
        "  sub sp, sp, #16",
        "2:",
        "  mov x8, #260",
        "  mov x0, #-1",
        "  mov x1, sp",
        "  mov x2, #0",
        "  mov x3, #0",
        "  svc #0",
        "  ldr w4, 6f",
        "  cmp w0, w4",
        "  b.eq 3f",
        "  cmn w0, #10",
        "  b.ne 2b",
        "  mov x0, #255",
        "  b 5f",
        "3:",
        "  ldr w4, [sp]",
        "  ands w0, w4, #127",
        "  b.eq 4f",
        "  add w0, w0, #128",
        "  b 5f",
        "4:",
        "  ubfx w0, w4, #8, #8",
        "5:",
        "  mov x8, #94",
        "  svc #0",
        "  brk #0",
        "6:",
        "  .long 0",
        "ckpt_reaper_end:",
        ".popsection",
    );
    /// The architecture's number in an ELF header: `EM_AARCH64`.
    pub const MACHINE: u16 = 183;
}

unsafe extern "C" {
    static ckpt_reaper_start: u8;
    static ckpt_reaper_end: u8;
}

const LOAD_ADDRESS: u64 = 0x1000_0000;
const ELF_HEADER_BYTES: u16 = 64;
const PROGRAM_HEADER_BYTES: u16 = 56;

/// The reaper's program file for a command with this PID: an ELF executable with one segment.
fn program(command_pid: i32) -> Vec<u8> {
    let (start, end) = (&raw const ckpt_reaper_start, &raw const ckpt_reaper_end);
    let bytes = end as usize - start as usize;
    // SAFETY: both labels lie in one section, start before end, and everything between is initialised constant data.
    let code = unsafe { std::slice::from_raw_parts(start, bytes) };
    let headers = u64::from(ELF_HEADER_BYTES + PROGRAM_HEADER_BYTES);
    let file_bytes = headers + code.len() as u64;
    let mut file = Vec::new();
    // ELF header: 64-bit, little-endian, version 1; executable, this architecture.
    file.extend(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0");
    file.extend(2_u16.to_le_bytes());
    file.extend(code::MACHINE.to_le_bytes());
    file.extend(1_u32.to_le_bytes());
    file.extend((LOAD_ADDRESS + headers).to_le_bytes());
    file.extend(u64::from(ELF_HEADER_BYTES).to_le_bytes());
    file.extend(0_u64.to_le_bytes());
    file.extend(0_u32.to_le_bytes());
    for half in [ELF_HEADER_BYTES, PROGRAM_HEADER_BYTES, 1, 64, 0, 0] {
        file.extend(half.to_le_bytes());
    }
    // Program header: one segment, readable and executable, the whole file.
    file.extend(1_u32.to_le_bytes());
    file.extend(5_u32.to_le_bytes());
    for word in [0, LOAD_ADDRESS, LOAD_ADDRESS, file_bytes, file_bytes, 0x1000] {
        file.extend(word.to_le_bytes());
    }
    file.extend(&code[..code.len() - 4]);
    file.extend(command_pid.to_le_bytes());
    file
}

/// Writes the program file to `path`, executable.
pub(super) fn write_program(path: &Path, command_pid: i32) -> io::Result<()> {
    let mut options = std::fs::File::options();
    let mut file = options.write(true).create(true).truncate(true).mode(0o700).open(path)?;
    file.write_all(&program(command_pid))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};

    /// Runs `script` as the command below a reaper and returns the reaper's exit code. A shell starts the command, which
    /// waits at a fifo until the shell has executed the reaper: until then the shell itself would reap the command.
    fn reaped(script: &str) -> i32 {
        let dir = tempfile::tempdir().unwrap();
        let dir_path = dir.path().canonicalize().unwrap();
        let path = |name: &str| dir_path.join(name);
        let deadline = Instant::now() + Duration::from_secs(300);
        let pause = |what: &str| {
            assert!(Instant::now() < deadline, "timed out waiting for {what}");
            std::thread::sleep(Duration::from_millis(1));
        };
        rustix::fs::mknodat(
            rustix::fs::CWD,
            path("gate"),
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RWXU,
            0,
        )
        .unwrap();
        let starter = format!(
            "sh -c 'read x < gate; {script}' & echo $! > pid.tmp; mv pid.tmp pid; while [ ! -e ok ]; do sleep 0.01; done; cp -p reaper.new reaper; exec ./reaper"
        );
        let mut command = Command::new("/bin/sh");
        // If the test fails, remaining processes do not hold its standard streams.
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.arg("-c").arg(starter).current_dir(&dir_path).spawn().unwrap();
        let pid = loop {
            match std::fs::read_to_string(path("pid")) {
                Ok(text) => break text.trim().parse().unwrap(),
                Err(_) => pause("the command"),
            }
        };
        // The shell copies the file: another test may fork a child while this process has the file open for writing, and
        // such a file cannot be executed.
        write_program(&path("reaper.new"), pid).unwrap();
        std::fs::write(path("ok"), "").unwrap();
        let exe = format!("/proc/{}/exe", child.id());
        while std::fs::read_link(&exe).unwrap() != path("reaper") {
            pause("the reaper");
        }
        std::fs::write(path("gate"), "go\n").unwrap();
        let status = child.wait().unwrap();
        assert_eq!(status.signal(), None, "the reaper crashed");
        status.code().unwrap()
    }

    #[test]
    fn ends_as_the_command_ends() {
        assert_eq!(reaped("exit 0"), 0);
        assert_eq!(reaped("exit 7"), 7);
        assert_eq!(reaped("kill -9 $$"), 128 + 9);
        assert_eq!(reaped("sleep 0.2; exit 3"), 3);
    }
}
