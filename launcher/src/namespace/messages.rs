//! Messages between launcher and init. Each message on the socket is a header, which also carries descriptors, and JSON.
//! Both ends are the same build of the same program, so the protocol has no version.

use super::peek::PeekedQueue;
use crate::sys::authentic::FileKey;
use crate::sys::deadline::{MESSAGE_RETRY_INTERVAL, MESSAGE_RETRY_TIMEOUT};
use ckpt_snapshot::{AffinityGroup, EventCounter, ProcessMemory, ProcessTree, SocketOptions};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io::{self, IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Instant;

/// The most descriptors in one message.
const MAX_FDS: usize = 16;
/// The longest message: command lines are at most 2 MiB, in JSON at most four times that.
const MAX_BYTES: u32 = 64 << 20;

/// The network of the job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Network {
    /// The machine's network.
    #[default]
    Host,
    /// A private network with a loopback interface only: its ports are always free when the job is resumed.
    Private,
    /// The machine's network, in which the nodes of a job have addresses of their own that stay.
    Job,
}

/// What the job sees of the names of machines (`--network job`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Names {
    /// The name of its own machine.
    pub hostname: String,
    /// The content of `/etc/hosts`.
    pub hosts: String,
}

/// The source of one of the job's standard streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StdioSource {
    /// The descriptor with this index in the message.
    Sent(usize),
    /// The job's terminal, opened by the init inside the namespace.
    Terminal,
}

/// From the launcher to the init.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Request {
    /// Start the job: the command under its reaper.
    StartJob {
        /// The command line, as bytes.
        argv: Vec<Vec<u8>>,
        /// Variables in addition to those of the launcher.
        variables: Vec<(String, Vec<u8>)>,
        /// Path of the terminal's slave side, if the job has a terminal.
        terminal: Option<String>,
        /// The three standard streams.
        stdio: [StdioSource; 3],
    },
    /// Start `criu swrk`. The descriptors sent along stay open in the init and in CRIU under the same numbers
    /// until CRIU ends; the terminal, when named, is opened and its number comes last.
    Criu {
        /// The program and its arguments; the number of its socket is appended.
        argv: Vec<Vec<u8>>,
        /// Path of the terminal's slave side.
        terminal: Option<String>,
        /// Whether the last descriptor is a library that is loaded into CRIU.
        with_library: bool,
    },
    /// The job of this command will be restored: write the program of its root.
    RestoreReaperProgram {
        /// The command.
        command_pid: i32,
    },
    /// Make this process, the root of a tree that CRIU is restoring, adopt orphans.
    MakeSubreaper {
        /// The root.
        root_pid: i32,
    },
    /// A restored tree has this root: report its end.
    Adopt {
        /// Its root, the reaper.
        root_pid: i32,
    },
    /// Send a signal.
    Signal {
        /// To this process…
        pid: i32,
        /// …or to its process group.
        group: bool,
        /// The signal's number.
        signal: i32,
    },
    /// Watch the files that the job writes.
    TrackFiles {
        /// The job's working directory, as bytes.
        cwd: Vec<u8>,
        /// Directories whose files are not reported, as bytes.
        excluded: Vec<Vec<u8>>,
    },
    /// Which files has the job written since the last such request with a file? Those that follow are appended to the
    /// file.
    WrittenFiles {
        /// The key of that file.
        key: FileKey,
    },
    /// Survey all processes but the init and CRIU.
    Survey,
    /// How many bytes wait in the queues of these sockets?
    QueuedBytes {
        /// Processes and their descriptors.
        sockets: Vec<(i32, i32)>,
    },
    /// What has the job in its descriptors that CRIU does not save? The job is frozen.
    Descriptors {
        /// Time for reading the options of sockets, milliseconds.
        limit_ms: u64,
    },
    /// The job sees these names of machines. Only in a namespace for [`Network::Job`], and before the job.
    SetNames(Names),
    /// Restore what CRIU does not.
    Apply {
        /// The restored processes.
        tree: ProcessTree,
    },
}

/// From the init to the launcher.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Reply {
    /// The namespace is set up.
    Ready {
        /// The directory of its private tmpfs.
        private_dir: String,
    },
    /// The job was started.
    Started {
        /// The reaper.
        root_pid: i32,
        /// The command.
        command_pid: i32,
    },
    /// The command could not be executed.
    NotStarted {
        /// `errno` of the exec.
        errno: i32,
    },
    /// CRIU was started; its socket is sent with this message.
    CriuStarted {
        /// Its PID.
        pid: i32,
        /// The numbers of the descriptors that were sent along, then the terminal's.
        fds: Vec<i32>,
    },
    /// The result of [`Request::TrackFiles`].
    Tracking {
        /// File systems that cannot be watched, with the reason.
        unwatched: Vec<(String, String)>,
    },
    /// The result of [`Request::WrittenFiles`].
    Written {
        /// Absolute paths.
        paths: Vec<String>,
        /// Whether these are all.
        is_complete: bool,
    },
    /// The result of [`Request::Survey`].
    Surveyed {
        /// All threads, grouped by the CPUs they may run on.
        affinity: Vec<AffinityGroup>,
        /// The last PID that was assigned.
        last_pid: i32,
        /// Memory that a dump would contain, bytes: anonymous, shared and swapped pages, and files in memory.
        memory_bytes: u64,
        /// PIDs of the processes.
        pids: Vec<i32>,
        /// Their memory, by PID, without device memory.
        processes: Vec<ProcessMemory>,
        /// Those of the processes that are not descendants of the job's root.
        strays: Vec<i32>,
        /// Number of SysV objects that a dump would not contain.
        lost_ipc: usize,
    },
    /// The result of [`Request::QueuedBytes`].
    QueuedBytes {
        /// For each socket, in the same order; `None` for one that cannot be asked.
        bytes: Vec<Option<u64>>,
    },
    /// The result of [`Request::Descriptors`].
    Descriptors {
        /// The queues of unix sockets that have messages of length zero.
        queues: Vec<PeekedQueue>,
        /// Options of sockets.
        socket_options: Vec<SocketOptions>,
        /// Number of sockets of which the options could not be read, or not in time.
        unread_sockets: usize,
        /// Eventfds with a count that does not fit into 32 bits.
        event_counters: Vec<EventCounter>,
    },
    /// Done.
    Done {
        /// What could not be restored.
        warnings: Vec<String>,
    },
    /// The request failed.
    Failed {
        /// What failed and why.
        message: String,
    },
    /// An event, not a reply: a child of the init ended.
    Exited {
        /// Its PID.
        pid: i32,
        /// Its exit code, 128 + n for signal n.
        code: i32,
    },
}

/// Sends one message, with descriptors.
pub(super) fn send(socket: &UnixStream, message: &impl Serialize, fds: &[BorrowedFd]) -> io::Result<()> {
    let body = serde_json::to_vec(message)?;
    let header = u32::try_from(body.len()).map_err(io::Error::other)?.to_le_bytes();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::other("too many descriptors for one message"));
    }
    let mut sent =
        retry_for_memory(|| sendmsg(socket, &[IoSlice::new(&header)], &mut control, SendFlags::NOSIGNAL))?;
    let message = [&header[..], &body].concat();
    while sent < message.len() {
        sent += retry_for_memory(|| rustix::net::send(socket, &message[sent..], SendFlags::NOSIGNAL))?;
    }
    Ok(())
}

/// Repeats a call for a while that is interrupted, or for which the kernel has no memory: the job ends with this
/// connection.
pub(super) fn retry_for_memory<T>(mut call: impl FnMut() -> rustix::io::Result<T>) -> rustix::io::Result<T> {
    let deadline = Instant::now() + MESSAGE_RETRY_TIMEOUT;
    loop {
        match retry_on_intr(&mut call) {
            Err(Errno::NOMEM | Errno::NOBUFS) if Instant::now() < deadline => {
                std::thread::sleep(MESSAGE_RETRY_INTERVAL);
            }
            other => return other,
        }
    }
}

/// Receives one message; `None` if the other end is closed.
pub(super) fn receive<T: DeserializeOwned>(socket: &UnixStream) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    let mut header = [0; 4];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = retry_for_memory(|| {
        recvmsg(socket, &mut [IoSliceMut::new(&mut header)], &mut control, RecvFlags::CMSG_CLOEXEC)
    });
    let received = match received {
        Err(Errno::CONNRESET) => return Ok(None),
        other => other?,
    };
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            fds.extend(received);
        }
    }
    if received.bytes == 0 {
        return Ok(None);
    }
    if received.flags.contains(ReturnFlags::CTRUNC) {
        return Err(io::Error::other("descriptors were dropped: too many files are open"));
    }
    let mut socket = socket;
    socket.read_exact(&mut header[received.bytes..])?;
    let length = u32::from_le_bytes(header);
    if length > MAX_BYTES {
        return Err(io::Error::other(format!("a message of {length} bytes is too long")));
    }
    let mut body = vec![0; length as usize];
    socket.read_exact(&mut body)?;
    Ok(Some((serde_json::from_slice(&body)?, fds)))
}
