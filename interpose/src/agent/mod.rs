//! The agent: one thread in each process of the job, which answers the launcher.
//!
//! ```text
//!                                    Quiesce, and the GPU's state cannot be taken off it: Failed
//!                                  +--+
//!              launcher is there   |  v     Quiesce, GPU's state is off, Quiesced
//!   Starting --------------------> Connected ------------------------> Away
//!      ^  |                        ^  |    |                            |
//!      |  | not there,             |  |    | Refused,                   | launcher is there again:
//!      |  | MAX_TRIES              |  |    | not understood             | Hello{away}, Deliver,
//!      |  v                        |  |    v                            | GPU's state is put back, Back
//!      |  Silent                   |  |    Silent                       |
//!      |                           +--|---------------------------------+
//!      +------------------------------+
//!            connection lost
//! ```
//!
//! While it is away, the agent holds no descriptor and nothing else that a dump could not save. It polls for the
//! launcher's socket in the file system and opens a socket of its own only once that exists. The launcher removes the
//! path before a dump and puts it back afterwards. The agent does not notice whether the process was dumped,
//! continued or restored meanwhile; a changed start time shows that it was restored.
//!
//! An agent is also away if it took the state off the GPU and then lost the connection. The process waits for its
//! state, and the launcher may have dumped it nevertheless. The state is put back before anything else, even if the
//! main thread has ended meanwhile.
//!
//! A forked child starts an agent of its own. Silent is final, in children too.
//!
//! A process whose main thread ends by `pthread_exit` ends with its last thread, which must not be the agent: the
//! agent ends as soon as the main thread has ended, or as soon as the state is back.

mod conversation;
mod main_thread;
mod serve;
#[cfg(test)]
mod tests;
mod thread;

use std::ffi::c_void;
use std::panic::catch_unwind;
use std::ptr::null_mut;

use crate::socket::{Address, Socket};
use crate::{cuda, fork, launcher};
use serve::{End, serve};

/// Starts the agent of a process at its very beginning, on the main thread.
pub fn install(address: Address) {
    // An allocator that the job brings along may have fork handlers too, and they have to come before ours,
    // which starts a thread: children run the handlers in the order of their registration. Being asked for
    // memory makes every allocator register them.
    drop(std::hint::black_box(Box::new(0_u8)));
    if !launcher::set_address(address) || !fork::install(restart_in_child) {
        return;
    }
    if main_thread::prepare() {
        start();
    }
}

/// Starts an agent in a forked child, on its only thread.
fn restart_in_child() {
    cuda::after_fork_in_child();
    // The parent's connection. The agent that it belonged to was not copied.
    drop(Socket::noted());
    start();
}

/// Starts the agent's thread. The calling thread is the process's only one, so descriptors can be opened here: no
/// other thread relies on the next number. (After a checkpoint the agent has a low number for some microseconds. An
/// application that closes a descriptor to get the same number again could miss it then.)
fn start() {
    let Some(address) = launcher::address() else { return };
    if !main_thread::watch() {
        return;
    }
    serve::note_start_time();
    if address.exists()
        && let Ok(socket) = Socket::open()
    {
        socket.keep();
    }
    if !thread::spawn(thread_main) {
        drop(Socket::noted());
    }
}

extern "C" fn thread_main(_: *mut c_void) -> *mut c_void {
    // SAFETY: takes no argument; it names the calling thread.
    let this = unsafe { libc::pthread_self() };
    // SAFETY: the thread was made joinable, and its ID is not kept to join it.
    unsafe { libc::pthread_detach(this) };
    // SAFETY: PR_SET_NAME reads a NUL-terminated string of at most 16 bytes.
    unsafe { libc::prctl(libc::PR_SET_NAME, c"ckpt-agent".as_ptr()) };
    let life = || {
        launcher::address().map_or(End::Silent, |address| serve(address, &mut cuda::ProcessGpu::default()))
    };
    if !catch_unwind(life).is_ok_and(|end| end == End::MainThread) {
        launcher::silence();
    }
    null_mut()
}
