//! What launcher and init say to each other. One socket, frames of JSON after a header that also carries
//! descriptors; both ends are the same build of the same program, so there is no version.

use ckpt_snapshot::AffinityGroup;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

/// The most descriptors in one message.
const MAX_FDS: usize = 16;
/// The longest message: command lines are at most 2 MiB, in JSON at most four times that.
const MAX_BYTES: u32 = 64 << 20;

/// Which network the job sees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Network {
    /// The machine's.
    #[default]
    Host,
    /// One of its own, with a loopback interface only: its ports are never taken when it is resumed.
    Private,
}

/// Where one of the job's standard streams comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StdioSource {
    /// The descriptor with this place in the message.
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
        /// Variables to set besides those of the launcher.
        variables: Vec<(String, Vec<u8>)>,
        /// Path of the terminal's slave side, when the job has one.
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
    },
    /// The job of this command is to be restored: put back what its root is executed from.
    PutBackReaper {
        /// The command.
        command_pid: i32,
    },
    /// Let this process, the root of a tree that CRIU is restoring, adopt orphans from now on.
    MakeSubreaper {
        /// The root.
        root_pid: i32,
    },
    /// A restored tree has this root: tell when it ends.
    Adopt {
        /// Its root, the reaper.
        root_pid: i32,
    },
    /// Send a signal.
    Signal {
        /// To this process…
        pid: i32,
        /// …or to the process group that it leads.
        group: bool,
        /// The signal's number.
        signal: i32,
    },
    /// Look at the threads of everything but the init and CRIU.
    Survey,
    /// Put back what CRIU does not.
    Apply {
        /// CPU affinity.
        affinity: Vec<AffinityGroup>,
        /// The last PID that had been given out.
        last_pid: i32,
    },
}

/// From the init to the launcher.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Reply {
    /// The namespace is set up.
    Ready,
    /// The job runs.
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
    /// CRIU runs; its socket comes with this message.
    CriuStarted {
        /// Its PID.
        pid: i32,
        /// The numbers of the descriptors that were sent along, then the terminal's.
        fds: Vec<i32>,
    },
    /// What [`Request::Survey`] found.
    Surveyed {
        /// All threads, by the CPUs they may run on.
        affinity: Vec<AffinityGroup>,
        /// The last PID given out.
        last_pid: i32,
        /// Memory that a dump would hold, bytes: anonymous, shared and swapped pages.
        resident_bytes: u64,
        /// PIDs of the processes.
        pids: Vec<i32>,
        /// Of these, the ones that are not below the job's root.
        strays: Vec<i32>,
        /// SysV objects that a dump would not have.
        lost_ipc: usize,
    },
    /// Done.
    Done {
        /// What could not be put back, in plain words.
        warnings: Vec<String>,
    },
    /// The request failed.
    Failed {
        /// What could not be done and why.
        message: String,
    },
    /// Not a reply but news: a child of the init ended.
    Exited {
        /// Which.
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
    let sent = sendmsg(socket, &[IoSlice::new(&header)], &mut control, SendFlags::NOSIGNAL)?;
    let mut socket = socket;
    socket.write_all(&header[sent..])?;
    socket.write_all(&body)
}

/// Receives one message; `None` when the other side is gone.
pub(super) fn receive<T: DeserializeOwned>(socket: &UnixStream) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    let mut header = [0; 4];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        let mut parts = [IoSliceMut::new(&mut header)];
        match recvmsg(socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::CONNRESET) => return Ok(None),
            other => break other?,
        }
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
        return Err(io::Error::other("descriptors were lost on the way: too many are open"));
    }
    let mut socket = socket;
    socket.read_exact(&mut header[received.bytes..])?;
    let length = u32::from_le_bytes(header);
    if length > MAX_BYTES {
        return Err(io::Error::other(format!("a message of {length} bytes")));
    }
    let mut body = vec![0; length as usize];
    socket.read_exact(&mut body)?;
    Ok(Some((serde_json::from_slice(&body)?, fds)))
}
