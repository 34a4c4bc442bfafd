//! The side of the checkpoint API that is asked: a page that others find, and a thread that carries out requests.
//!
//! The page lies in a memfd and names a descriptor of this process: the far end of a pair of sockets. A caller
//! takes a copy of it and sends its request; this process's thread reads it from the near end. CRIU saves all of
//! it like any other memory, socket and thread, so a restored process is found and asked the same way.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use std::sync::atomic::Ordering;

use cuda_abi::sys::CUresult;
use rustix::fs::{FlockOperation, MemfdFlags, flock, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::ProtFlags;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair};

use super::fork::{self, Slot};
use super::state::{self, State};
use super::wire::{
    MAGIC, MAX_REQUEST_BYTES, PAGE_BYTES, PAGE_NAME, Page, Request, THREAD_NAME, VERSION, encode_reply,
};
use simcuda_machine::Mapping;

struct Control {
    memfd: OwnedFd,
    mapping: Mapping,
    /// The thread's end.
    near: OwnedFd,
    /// What callers copy.
    _far: OwnedFd,
}

impl Control {
    fn page(&self) -> &Page {
        // SAFETY: the mapping is a whole page, page-aligned, zeroed at first and lives as long as `self`; all fields
        // are atomics, for which every bit pattern is valid.
        unsafe { self.mapping.start().cast::<Page>().as_ref() }
    }
}

static CONTROL: OnceLock<Control> = OnceLock::new();
/// The thread's ID, which CRIU restores like a PID.
static THREAD_ID: OnceLock<i32> = OnceLock::new();

/// Makes this process one that can be found and asked. Called once.
///
/// # Errors
/// What the kernel refuses.
pub(super) fn start() -> io::Result<()> {
    let memfd = memfd_create(PAGE_NAME, MemfdFlags::CLOEXEC)?;
    ftruncate(&memfd, PAGE_BYTES as u64)?;
    let mapping = Mapping::shared(memfd.as_fd(), PAGE_BYTES, ProtFlags::READ | ProtFlags::WRITE)?;
    let (near, far) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    fork::close_in_child(Slot::Page, Some(memfd.as_fd()));
    fork::close_in_child(Slot::Ours, Some(near.as_fd()));
    fork::close_in_child(Slot::Theirs, Some(far.as_fd()));
    let socket = far.as_raw_fd();
    let control = CONTROL.get_or_init(|| Control { memfd, mapping, near, _far: far });
    let page = control.page();
    page.socket.store(socket, Ordering::Relaxed);
    page.state.store(state::current() as u32, Ordering::Relaxed);
    page.version.store(VERSION, Ordering::Relaxed);
    without_signals(|| {
        let (say, heard) = std::sync::mpsc::sync_channel(1);
        let thread = move || {
            // The starter listens until it has heard it.
            let _ = say.send(rustix::thread::gettid().as_raw_nonzero().get());
            answer_requests(control);
        };
        std::thread::Builder::new().name(THREAD_NAME.into()).spawn(thread)?;
        let id = heard.recv().map_err(io::Error::other)?;
        THREAD_ID.get_or_init(|| id);
        Ok::<_, io::Error>(())
    })?;
    // A caller believes the rest when it sees this.
    page.magic.store(MAGIC, Ordering::Release);
    Ok(())
}

/// Publishes the state to other processes.
pub(super) fn publish(state: State) {
    if let Some(control) = CONTROL.get() {
        control.page().state.store(state as u32, Ordering::Release);
    }
}

/// The thread that carries out what other processes ask for, once [`start`] has succeeded.
pub(super) fn thread_id() -> Option<i32> {
    THREAD_ID.get().copied()
}

/// Runs `body` with all signals blocked: a thread that it starts has them blocked for good, so that the program's
/// signals are handled by the program's threads.
fn without_signals<T>(body: impl FnOnce() -> T) -> T {
    let mut all = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigfillset initialises the set that it is given.
    unsafe { libc::sigfillset(all.as_mut_ptr()) };
    // SAFETY: `all` is initialised; `before` is written.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr()) };
    let result = body();
    // SAFETY: the call above has initialised `before`.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut()) };
    result
}

fn answer_requests(control: &Control) {
    // A byte more, so that a message that is too long is not taken for one that is cut off.
    let mut buffer = [0; MAX_REQUEST_BYTES + 1];
    loop {
        match recv(&control.near, &mut buffer, RecvFlags::empty()) {
            Ok((len, _)) => answer(control, &buffer[..len]),
            Err(Errno::INTR) => {}
            // The program has closed a descriptor that is not its own. No request can arrive any more.
            Err(_) => return,
        }
    }
}

fn answer(control: &Control, message: &[u8]) {
    let Some(request) = Request::decode(message) else { return };
    let wanted = || is_wanted(control, request.number);
    if !wanted() {
        return;
    }
    let result = catch_unwind(AssertUnwindSafe(|| state::carry_out(&request.operation, &wanted)))
        .unwrap_or(Err(CUresult::CUDA_ERROR_UNKNOWN));
    // If the caller has ended, the next caller discards the answer; sending never blocks.
    let _ =
        send(&control.near, &encode_reply(request.number, result), SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
}

/// Whether the caller of a request still waits: it then holds the lock of the file and is named in the page.
fn is_wanted(control: &Control, number: u64) -> bool {
    control.page().caller.load(Ordering::Acquire) == number && is_locked(control.memfd.as_fd())
}

fn is_locked(memfd: BorrowedFd<'_>) -> bool {
    match flock(memfd, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {
            let _ = flock(memfd, FlockOperation::Unlock);
            false
        }
        Err(_) => true,
    }
}
