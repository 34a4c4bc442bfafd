//! System calls in which a dump interrupts the job's threads.
//!
//! The kernel makes `poll`, `nanosleep`, `clock_nanosleep` and `futex` with a timeout again by itself when a task was
//! stopped in them. CRIU 4.2.1 has them return EINTR instead, in the job that goes on and after a resume (compel's
//! `compel_get_task_regs`). Programs never see that otherwise, and many do not expect it: PyTorch's TCPStore raises
//! "Interrupted system call". CRIU also makes calls such as `read` again for which a signal handler without SA_RESTART
//! has run. A library that is loaded into CRIU for the dump corrects both: see `registers.rs`.
//!
//! Only x86-64: elsewhere, the library does nothing.

#[cfg(test)]
mod registers;

use crate::namespace::inside;
use rustix::fs::{MemfdFlags, memfd_create};
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::Path;

/// Made by `build.rs` from `library.rs`.
const LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/libckpt_criu.so"));
const NAME: &str = "libckpt_criu.so";
/// The name that the library gives to the process.
const COMM: &str = "criu-with-calls";

/// The library, as a file in memory.
///
/// # Errors
/// When there is not enough memory.
pub fn library() -> io::Result<OwnedFd> {
    let mut file = File::from(memfd_create(NAME, MemfdFlags::CLOEXEC)?);
    file.write_all(LIBRARY)?;
    Ok(file.into())
}

/// Whether the library is in this CRIU, which has begun to trace the job. `root` is the root directory of its namespace.
#[must_use]
pub fn has_library(root: &Path, criu_pid: i32) -> bool {
    fs::read_to_string(inside(root, format!("/proc/{criu_pid}/comm")))
        .is_ok_and(|comm| comm.trim_end() == COMM)
}
