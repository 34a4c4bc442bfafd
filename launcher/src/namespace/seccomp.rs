//! io_uring is answered with "not implemented": CRIU cannot dump a ring, and everything that uses io_uring (libuv in
//! PyTorch's TCPStore, uvloop) falls back to epoll. CRIU saves and restores the filter with each process.

use std::io;

/// `io_uring_setup` has this number on every architecture.
const IO_URING_SETUP: u32 = 425;
/// Set in x32 system call numbers.
const X32_BIT: u32 = 0x4000_0000;

/// Installs the filter on this thread and everything that it starts from now on.
pub(super) fn deny_io_uring() -> io::Result<()> {
    let statement = |code: u32, k: u32| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k };
    let equals = |k: u32, jt: u8, jf: u8| libc::sock_filter {
        code: (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16,
        jt,
        jf,
        k,
    };
    let answer = libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32;
    let mut program = [
        // The system call's number is the first field of `struct seccomp_data`.
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0),
        equals(IO_URING_SETUP, 1, 0),
        equals(IO_URING_SETUP | X32_BIT, 0, 1),
        statement(libc::BPF_RET | libc::BPF_K, answer),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW),
    ];
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    let install = || {
        // SAFETY: `filter` points to `program`, both live across the call; the kernel copies the program.
        unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &raw const filter) }
    };
    if install() == 0 {
        return Ok(());
    }
    // Without CAP_SYS_ADMIN the kernel wants the promise that set-user-ID programs gain nothing.
    rustix::thread::set_no_new_privs(true)?;
    if install() == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
