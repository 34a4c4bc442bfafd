//! File descriptors that follow a message.
//!
//! A message that announces descriptors is followed by one byte, to which they are attached (`SCM_RIGHTS`,
//! unix(7)). A reader never reads beyond the last byte of a message, so it receives the descriptors with that byte.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

/// The maximum number of descriptors per message. The kernel's limit is 253 (`SCM_MAX_FD`), but a process may have few
/// descriptors left.
pub const MOST: usize = 64;

const MARK: u8 = 0xfd;

/// Sends the descriptors that the last message has announced. Does nothing if there are none.
///
/// # Errors
/// The error of the system call, and `InvalidInput` for more than [`MOST`].
pub fn send(socket: BorrowedFd<'_>, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    if descriptors.is_empty() {
        return Ok(());
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if descriptors.len() > MOST || !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(ErrorKind::InvalidInput.into());
    }
    let sent = rustix::io::retry_on_intr(|| {
        sendmsg(socket, &[IoSlice::new(&[MARK])], &mut control, SendFlags::NOSIGNAL)
    })?;
    if sent == 1 { Ok(()) } else { Err(ErrorKind::WriteZero.into()) }
}

/// Receives the `count` descriptors that a message has announced; they are close-on-exec.
///
/// # Errors
/// The error of the system call, `UnexpectedEof` if the peer has closed the connection, and `InvalidData` if fewer
/// descriptors arrived: the receiver may have reached its limit of open files.
pub fn receive(socket: BorrowedFd<'_>, count: usize) -> io::Result<Vec<OwnedFd>> {
    let mut received = Vec::with_capacity(count.min(MOST));
    if count == 0 {
        return Ok(received);
    }
    let mut mark = [0];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let message = rustix::io::retry_on_intr(|| {
        recvmsg(socket, &mut [IoSliceMut::new(&mut mark)], &mut control, RecvFlags::CMSG_CLOEXEC)
    })?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            received.extend(descriptors);
        }
    }
    match message.bytes {
        0 => Err(ErrorKind::UnexpectedEof.into()),
        _ if mark == [MARK] && received.len() == count => Ok(received),
        _ => Err(ErrorKind::InvalidData.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read, Seek, Write};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn open_files_arrive_between_bytes() {
        let (mut here, mut there) = UnixStream::pair().expect("a pair");
        let mut files: Vec<File> = (0..MOST).map(|_| tempfile::tempfile().expect("a file")).collect();
        for (number, file) in files.iter_mut().enumerate() {
            write!(file, "{number}").expect("written");
        }
        let borrowed: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        here.write_all(b"ab").expect("written");
        send(here.as_fd(), &borrowed).expect("sent");
        send(here.as_fd(), &[]).expect("nothing to send");
        here.write_all(b"cd").expect("written");
        let mut bytes = [0; 2];
        there.read_exact(&mut bytes).expect("read");
        assert_eq!(&bytes, b"ab");
        let received = receive(there.as_fd(), MOST).expect("received");
        assert!(receive(there.as_fd(), 0).expect("nothing to receive").is_empty());
        there.read_exact(&mut bytes).expect("read");
        assert_eq!(&bytes, b"cd");
        for (number, file) in received.into_iter().enumerate() {
            let (mut file, mut text) = (File::from(file), String::new());
            file.rewind().expect("rewound");
            file.read_to_string(&mut text).expect("read");
            assert_eq!(text, number.to_string());
        }
    }

    #[test]
    fn missing_descriptors_are_an_error() {
        let (mut here, there) = UnixStream::pair().expect("a pair");
        let file = tempfile::tempfile().expect("a file");
        send(here.as_fd(), &[file.as_fd()]).expect("sent");
        assert_eq!(receive(there.as_fd(), 2).expect_err("one is missing").kind(), ErrorKind::InvalidData);
        here.write_all(b"x").expect("written");
        assert_eq!(receive(there.as_fd(), 1).expect_err("no mark").kind(), ErrorKind::InvalidData);
        drop(here);
        assert_eq!(receive(there.as_fd(), 1).expect_err("the end").kind(), ErrorKind::UnexpectedEof);
    }

    #[test]
    fn too_many_are_refused() {
        let (here, _there) = UnixStream::pair().expect("a pair");
        let file = tempfile::tempfile().expect("a file");
        let many = vec![file.as_fd(); MOST + 1];
        assert_eq!(send(here.as_fd(), &many).expect_err("too many").kind(), ErrorKind::InvalidInput);
    }
}
