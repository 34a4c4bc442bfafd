//! The service thread: hands this rank's memory to its peers, as descriptors over a unix socket.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::thread::JoinHandle;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};

use crate::types::{Result, warn};

/// What a peer asks for.
pub(crate) const BUFFER: u8 = 0;
/// The end of the service, asked for by the rank itself.
const END: u8 = 255;

/// A running service, ended when dropped.
pub(crate) struct Service {
    name: String,
    thread: Option<JoinHandle<()>>,
}

fn name_of(number: u64, rank: usize) -> String {
    format!("simnccl-{number:016x}-{rank}")
}

fn connect(name: &str) -> io::Result<UnixStream> {
    UnixStream::connect_addr(&SocketAddr::from_abstract_name(name)?)
}

impl Service {
    /// Starts it. `export` makes a descriptor of what is asked for.
    pub(crate) fn start(
        number: u64,
        rank: usize,
        export: impl Fn(u8) -> Result<OwnedFd> + Send + 'static,
    ) -> io::Result<Self> {
        let name = name_of(number, rank);
        let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name)?)?;
        let serve = move || {
            while let Ok((mut stream, _)) = listener.accept() {
                let mut what = [END];
                if stream.read_exact(&mut what).is_err() {
                    continue;
                }
                if what == [END] {
                    return;
                }
                if let Ok(descriptor) = export(what[0])
                    && let Err(error) = send(&stream, descriptor.as_fd())
                {
                    warn(&format!("service: {error}"));
                }
            }
        };
        let thread = std::thread::Builder::new().name("simnccl-service".into()).spawn(serve)?;
        Ok(Self { name, thread: Some(thread) })
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let ended = connect(&self.name).and_then(|mut stream| stream.write_all(&[END]));
        if let (Ok(()), Some(thread)) = (ended, self.thread.take()) {
            // A panic of the thread has been printed.
            let _ = thread.join();
        }
    }
}

/// A peer's memory.
pub(crate) fn fetch(number: u64, rank: usize, what: u8) -> io::Result<OwnedFd> {
    let mut stream = connect(&name_of(number, rank))?;
    stream.write_all(&[what])?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let flags = RecvFlags::CMSG_CLOEXEC;
    rustix::net::recvmsg(&stream, &mut [IoSliceMut::new(&mut byte)], &mut control, flags)?;
    let descriptor = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    descriptor.ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof))
}

fn send(stream: &UnixStream, descriptor: BorrowedFd<'_>) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = [descriptor];
    if !control.push(SendAncillaryMessage::ScmRights(&descriptors)) {
        return Err(io::Error::other("no room for a descriptor"));
    }
    rustix::net::sendmsg(stream, &[IoSlice::new(b"d")], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}
