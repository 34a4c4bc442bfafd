//! A second process that uses the driver, led by a check.

use std::io::{BufRead, BufReader, IoSlice, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use rustix::io::FdFlags;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};

use crate::check::{Result, Stop, failed};
use crate::{gpu, roles};

/// How the helper's answers begin; whatever else the driver prints is passed over.
pub const ANSWER: &str = "answer ";

/// A running helper. It does what [`roles`] understands, one line after the other, and ends with this value.
pub struct Helper {
    child: Child,
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
    socket: UnixStream,
}

fn broken(what: &str) -> impl Fn(std::io::Error) -> Stop {
    move |error| Stop::Failed(format!("helper process: {what}: {error}"))
}

impl Helper {
    /// The end of the message that a helper has ended.
    pub const ENDED: &str = "it has ended";

    /// Starts a process that has opened the driver, and no more.
    pub fn spawn() -> Result<Self> {
        Self::spawn_by(|command| command)
    }

    /// As [`Helper::spawn`], by another command that executes the given one, or in another environment.
    pub fn spawn_by(change: impl FnOnce(Command) -> Command) -> Result<Self> {
        let (socket, far) = UnixStream::pair().map_err(broken("socket"))?;
        let inherit = rustix::io::fcntl_setfd(&far, FdFlags::empty());
        inherit.map_err(|error| Stop::Failed(format!("helper process: socket: {error}")))?;
        let number = far.as_raw_fd().to_string();
        let command = roles::command(gpu::path(), &["serve", &number]).map_err(broken("command"))?;
        let mut command = change(command);
        let spawned = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = spawned.map_err(broken("start"))?;
        let (Some(commands), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            return failed("helper process: no pipes");
        };
        Ok(Self { child, commands, answers: BufReader::new(stdout), socket })
    }

    /// As [`Helper::spawn`], with device 0's primary context.
    pub fn start() -> Result<Self> {
        let mut helper = Self::spawn()?;
        helper.ask("start")?;
        Ok(helper)
    }

    /// The helper's process ID.
    pub fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).expect("process IDs are positive and small")
    }

    /// Sends a command and waits for its answer.
    pub fn ask(&mut self, command: &str) -> Result<String> {
        self.send_command(command)?;
        self.read_answer()
    }

    /// As [`Helper::ask`], for a number.
    pub fn number(&mut self, command: &str) -> Result<u64> {
        let answer = self.ask(command)?;
        answer.parse().map_err(|_| Stop::Failed(format!("helper process: {command}: {answer:?}")))
    }

    /// Sends a command without waiting for its answer.
    pub fn send_command(&mut self, command: &str) -> Result {
        writeln!(self.commands, "{command}").map_err(broken(command))
    }

    /// Waits for an answer.
    pub fn read_answer(&mut self) -> Result<String> {
        loop {
            let mut line = String::new();
            if self.answers.read_line(&mut line).map_err(broken("answer"))? == 0 {
                return failed(format!("helper process: {}", Self::ENDED));
            }
            if let Some(answer) = line.trim_end().strip_prefix(ANSWER) {
                return match answer.split_once(' ') {
                    Some(("error", text)) => failed(format!("helper process: {text}")),
                    Some(("skip", why)) => Err(Stop::Skipped(why.to_owned())),
                    Some((_, value)) => Ok(value.to_owned()),
                    None => Ok(String::new()),
                };
            }
        }
    }

    /// Gives the helper a descriptor.
    pub fn send(&self, descriptor: impl AsFd) -> Result {
        send_descriptor(&self.socket, descriptor.as_fd()).map_err(broken("sending a descriptor"))
    }

    /// Takes a descriptor from the helper.
    pub fn receive(&self) -> Result<OwnedFd> {
        receive_descriptor(&self.socket).map_err(broken("receiving a descriptor"))
    }

    /// The signal that ends the process, which has closed its output or is about to.
    pub fn end_signal(&mut self) -> Result<Option<i32>> {
        Ok(self.child.wait().map_err(broken("wait"))?.signal())
    }

    /// Kills the process with SIGKILL and waits for its end.
    pub fn kill(&mut self) -> Result {
        self.child.kill().map_err(broken("kill"))?;
        self.child.wait().map_err(broken("wait"))?;
        Ok(())
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        // An error means that the process has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Sends one descriptor.
pub fn send_descriptor(socket: &UnixStream, descriptor: BorrowedFd<'_>) -> std::io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = [descriptor];
    if !control.push(SendAncillaryMessage::ScmRights(&descriptors)) {
        return Err(std::io::Error::other("no room for a descriptor"));
    }
    rustix::net::sendmsg(socket, &[IoSlice::new(b"d")], &mut control, SendFlags::empty())?;
    Ok(())
}

/// Receives one descriptor.
pub fn receive_descriptor(socket: &UnixStream) -> std::io::Result<OwnedFd> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let descriptor = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    descriptor.ok_or_else(|| std::io::Error::other("the message holds no descriptor"))
}
