//! Refuses kernel features that CRIU cannot save, so that programs use their fallback:
//!
//! - io_uring is answered with "not implemented": CRIU cannot dump a ring. libuv (in PyTorch's TCPStore) and uvloop fall
//!   back to epoll.
//! - A request for dynamically enabled CPU features (AMX, arch_prctl(2) with ARCH_REQ_XCOMP_PERM) is answered as on a CPU
//!   without them. CRIU saves neither the tile registers nor the permission: a restored process, and even one that
//!   continues after a dump, would be killed by SIGILL. oneDNN falls back to AVX-512.
//!
//! CRIU saves and restores the filter with each process.
//!
//! Before Linux 5.16, a process with a filter also gets mitigations of speculative execution (SSBD, STIBP), which make it slower,
//! unless the filter is set with SECCOMP_FILTER_FLAG_SPEC_ALLOW. This filter is no sandbox, so it is. CRIU restores filters
//! without that flag.

use std::io;

/// `io_uring_setup` has this number on every architecture.
const IO_URING_SETUP: u32 = 425;
/// Offset of the system call's number in `struct seccomp_data` (bytes).
const NUMBER: u32 = 0;
/// The mitigations of speculative execution stay as they are (Linux 4.17).
const FLAGS: libc::c_ulong = libc::SECCOMP_FILTER_FLAG_SPEC_ALLOW;

/// Installs the filter on this thread and everything that it starts from now on.
pub(super) fn deny_unsavable_features() -> io::Result<()> {
    let mut program = program();
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    let install = || {
        // SAFETY: `filter` points to `program`, both live across the call; the kernel copies the program.
        unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, FLAGS, &raw const filter) }
    };
    if install() == 0 {
        return Ok(());
    }
    // Without CAP_SYS_ADMIN the kernel wants the promise that set-user-ID programs gain nothing.
    rustix::thread::set_no_new_privs(true)?;
    if install() == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// `arch_prctl` exists on x86-64 only, and so do the numbers of x32.
#[cfg(target_arch = "x86_64")]
fn program() -> [libc::sock_filter; 10] {
    const ARCH_PRCTL: u32 = libc::SYS_arch_prctl as u32;
    /// The request for a dynamically enabled feature (asm/prctl.h, Linux 5.16).
    const ARCH_REQ_XCOMP_PERM: u32 = 0x1023;
    /// Set in x32 system call numbers.
    const X32_BIT: u32 = 0x4000_0000;
    /// Offset of the lower half of the first argument in `struct seccomp_data` (bytes).
    const FIRST_ARGUMENT: u32 = 16;
    [
        load(NUMBER),
        jump_if_equal(IO_URING_SETUP, 5, 0),
        jump_if_equal(IO_URING_SETUP | X32_BIT, 4, 0),
        jump_if_equal(ARCH_PRCTL, 1, 0),
        jump_if_equal(ARCH_PRCTL | X32_BIT, 0, 4),
        load(FIRST_ARGUMENT),
        jump_if_equal(ARCH_REQ_XCOMP_PERM, 1, 2),
        fail(libc::ENOSYS),
        fail(libc::EOPNOTSUPP),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW),
    ]
}

#[cfg(target_arch = "aarch64")]
fn program() -> [libc::sock_filter; 4] {
    [
        load(NUMBER),
        jump_if_equal(IO_URING_SETUP, 0, 1),
        fail(libc::ENOSYS),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW),
    ]
}

fn load(offset: u32) -> libc::sock_filter {
    statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, offset)
}

fn fail(errno: i32) -> libc::sock_filter {
    statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ERRNO | errno as u32)
}

fn statement(code: u32, k: u32) -> libc::sock_filter {
    libc::sock_filter { code: code as u16, jt: 0, jf: 0, k }
}

/// Skips `jt` statements if the loaded value is `k`, otherwise `jf`.
fn jump_if_equal(k: u32, jt: u8, jf: u8) -> libc::sock_filter {
    libc::sock_filter { code: (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16, jt, jf, k }
}
