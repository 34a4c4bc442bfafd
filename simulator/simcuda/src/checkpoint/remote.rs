//! The side of the checkpoint API that asks: another process, by its PID.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::Ordering;

use cuda_abi::sys::CUresult;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustix::mm::ProtFlags;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use rustix::rand::{GetRandomFlags, getrandom};

use super::state::State;
use super::wire::{
    MAGIC, Operation, PAGE_BYTES, PAGE_NAME, Page, REPLY_BYTES, Request, THREAD_NAME, VERSION, decode_reply,
};
use crate::error::Result;
use simcuda_machine::Mapping;

/// Another process that holds driver state.
pub(super) struct Target {
    pid: i32,
    pidfd: OwnedFd,
    /// Opened anew, so that its file lock is this caller's alone.
    memfd: File,
    mapping: Mapping,
}

/// The process that a thread ID or PID belongs to. That a thread's ID is accepted is a hazard of the real one too
/// (NVIDIA/cuda-checkpoint issue 41).
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` if there is none.
pub(super) fn process_of(pid: i32) -> Result<i32> {
    if pid <= 0 {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    let status = fs::read_to_string(format!("/proc/{pid}/status")).map_err(|error| refused(&error))?;
    status
        .lines()
        .find_map(|line| line.strip_prefix("Tgid:"))
        .and_then(|number| number.trim().parse().ok())
        .ok_or(CUresult::CUDA_ERROR_OPERATING_SYSTEM)
}

impl Target {
    /// Finds what a process shows of itself; `pid` is a process's, not a thread's.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if there is no such process, `CUDA_ERROR_NOT_INITIALIZED` if it holds no driver
    /// state, `CUDA_ERROR_OPERATING_SYSTEM` if this process may not trace it.
    pub(super) fn find(pid: i32) -> Result<Self> {
        let named = Pid::from_raw(pid).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let pidfd = pidfd_open(named, PidfdFlags::empty()).map_err(|error| refused(&error.into()))?;
        let link_text = format!("/memfd:{PAGE_NAME} (deleted)");
        for entry in fs::read_dir(format!("/proc/{pid}/fd")).map_err(|error| refused(&error))? {
            let path = entry.map_err(|error| refused(&error))?.path();
            // A descriptor that is closed meanwhile is not the one.
            if fs::read_link(&path).is_ok_and(|link| link == Path::new(&link_text))
                && let Some((memfd, mapping)) = open_page(&path).map_err(|error| refused(&error))?
            {
                return Ok(Self { pid, pidfd, memfd, mapping });
            }
        }
        Err(CUresult::CUDA_ERROR_NOT_INITIALIZED)
    }

    fn page(&self) -> &Page {
        // SAFETY: `open_page` made sure of a whole page behind the mapping, which lives as long as `self`; all
        // fields are atomics, for which every bit pattern is valid.
        unsafe { self.mapping.start().cast::<Page>().as_ref() }
    }

    /// # Errors
    /// `CUDA_ERROR_UNKNOWN` if the page says none.
    pub(super) fn state(&self) -> Result<State> {
        self.page().state().ok_or(CUresult::CUDA_ERROR_UNKNOWN)
    }

    /// The ID, as this process sees it, of the thread that carries out requests.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if the process has ended.
    pub(super) fn thread_id(&self) -> Result<i32> {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.pid)).map_err(|error| refused(&error))?;
        tasks
            .flatten()
            .find(|task| {
                fs::read_to_string(task.path().join("comm")).is_ok_and(|name| name.trim_end() == THREAD_NAME)
            })
            .and_then(|task| task.file_name().to_str()?.parse().ok())
            .ok_or(CUresult::CUDA_ERROR_NOT_INITIALIZED)
    }

    /// Has the process carry out an operation, after the operations of other callers.
    ///
    /// # Errors
    /// The operation's own; `CUDA_ERROR_INVALID_VALUE` if the process ends meanwhile, `CUDA_ERROR_OPERATING_SYSTEM`
    /// if this process may not take a descriptor of it.
    pub(super) fn carry_out(&self, operation: Operation) -> Result {
        self.ask(operation).unwrap_or_else(|error| Err(refused(&error)))
    }

    fn ask(&self, operation: Operation) -> io::Result<Result> {
        // Goes with the descriptor, also when this process is killed.
        retry(|| flock(&self.memfd, FlockOperation::LockExclusive))?;
        let socket =
            pidfd_getfd(&self.pidfd, self.page().socket.load(Ordering::Acquire), PidfdGetfdFlags::empty())?;
        let number = random()?;
        self.page().caller.store(number, Ordering::Release);
        let request = Request { number, operation }.encode();
        retry(|| send(&socket, &request, SendFlags::NOSIGNAL))?;
        loop {
            let mut sources = [PollFd::new(&socket, PollFlags::IN), PollFd::new(&self.pidfd, PollFlags::IN)];
            retry(|| poll(&mut sources, None))?;
            let [has_reply, has_ended] = sources.map(|source| !source.revents().is_empty());
            if has_reply {
                if let Some(result) = read_reply(socket.as_fd(), number)? {
                    return Ok(result);
                }
            } else if has_ended {
                return Err(Errno::SRCH.into());
            }
        }
    }
}

/// The result of the request, or `None` for the answer to one whose caller has ended.
fn read_reply(socket: BorrowedFd<'_>, number: u64) -> io::Result<Option<Result>> {
    let mut reply = [0; REPLY_BYTES];
    let (len, _) = retry(|| recv(socket, &mut reply, RecvFlags::DONTWAIT))?;
    if len == 0 {
        return Err(Errno::SRCH.into());
    }
    Ok(decode_reply(&reply[..len]).filter(|reply| reply.0 == number).map(|reply| reply.1))
}

/// Opens and maps a page of this version; `None` for a file that only has its name.
fn open_page(path: &Path) -> io::Result<Option<(File, Mapping)>> {
    let memfd = match OpenOptions::new().read(true).write(true).open(path) {
        Ok(memfd) => memfd,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    // Memory behind the end of a file cannot be touched.
    if memfd.metadata()?.len() < PAGE_BYTES as u64 {
        return Ok(None);
    }
    let mapping = Mapping::shared(memfd.as_fd(), PAGE_BYTES, ProtFlags::READ | ProtFlags::WRITE)?;
    // SAFETY: as in `Target::page`.
    let page = unsafe { mapping.start().cast::<Page>().as_ref() };
    let is_ours =
        page.magic.load(Ordering::Acquire) == MAGIC && page.version.load(Ordering::Relaxed) == VERSION;
    Ok(is_ours.then_some((memfd, mapping)))
}

fn random() -> io::Result<u64> {
    let mut bytes = [0; 8];
    // So few bytes come all at once.
    getrandom(&mut bytes, GetRandomFlags::empty())?;
    Ok(u64::from_ne_bytes(bytes))
}

fn retry<T>(mut call: impl FnMut() -> rustix::io::Result<T>) -> io::Result<T> {
    Ok(rustix::io::retry_on_intr(&mut call)?)
}

/// What the API says where the kernel says `error`.
fn refused(error: &io::Error) -> CUresult {
    match Errno::from_io_error(error) {
        Some(Errno::NOENT | Errno::SRCH | Errno::INVAL | Errno::CONNRESET | Errno::PIPE) => {
            CUresult::CUDA_ERROR_INVALID_VALUE
        }
        _ => CUresult::CUDA_ERROR_OPERATING_SYSTEM,
    }
}
