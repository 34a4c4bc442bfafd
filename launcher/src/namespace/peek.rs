//! Messages of length zero in the queues of the job's unix sockets, found while the job is frozen.
//!
//! CRIU 4.2.1 takes such a message for the end of a queue and leaves out all that follow (`dump_sk_queue` in its
//! sk-queue.c). It asks for the messages with MSG_PEEK at an offset (SO_PEEK_OFF). The kernel shows an empty message
//! once in this way and marks it: later it is passed over, unless it is the first message and no offset is set
//! (`__skb_try_recv_from_queue` in net/core/datagram.c). So CRIU sees all other messages after [`Peeker::look`], and
//! the [`Peeker`] alone knows where the empty ones are, at later checkpoints too.
//!
//! A later look has to know which messages of an earlier one are still there. Every message that is received with
//! SO_TIMESTAMPNS has a time stamp, which the kernel adds if there is none, and keeps (`__sock_recv_timestamp` in
//! net/socket.c). The time stamp of the first message tells how many messages have been received since.

use super::descriptors::{self, OpenSockets};
use crate::sys::path_text::read_text;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// The offset at which nothing is peeked at: the first message is.
const NO_OFFSET: libc::c_int = -1;
/// Options for time stamps, of which a socket has one at most. The last two are those of the kernel's
/// asm-generic/socket.h for 64-bit times: SO_TIMESTAMPNS_NEW, and SO_TIMESTAMP_NEW, which is also reported with the former.
const TIME_STAMPS: [libc::c_int; 4] = [libc::SO_TIMESTAMP, libc::SO_TIMESTAMPNS, 64, 63];
/// Room for one control message: a header of 16 bytes and a time.
const CONTROL_WORDS: usize = 4;
/// The longest content that is copied, for one queue.
const MOST_DATA_BYTES: usize = 8 << 20;

/// The content of a queue that has messages of length zero.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeekedQueue {
    /// A process that has the socket.
    pub pid: i32,
    /// Its descriptor.
    pub fd: i32,
    /// The socket's inode.
    pub inode: u64,
    /// All messages; `None` if it is not known where the empty ones are.
    pub messages: Option<Vec<PeekedMessage>>,
}

/// A message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeekedMessage {
    /// Its length.
    pub bytes: usize,
    /// Whether it has descriptors or other control messages.
    pub has_control: bool,
    /// Its content, if CRIU does not read the queue: it does not if the kernel says that there is nothing in it, as for
    /// a socket for datagrams whose first message is empty.
    pub data: Option<Vec<u8>>,
}

/// What is known of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Seen {
    /// A `timespec`.
    stamp: [u64; 2],
    bytes: usize,
    has_control: bool,
}

/// Finds empty messages, and remembers them.
#[derive(Default)]
pub(super) struct Peeker {
    /// The messages of queues that have empty ones, by the socket's inode.
    known: HashMap<u64, Vec<Seen>>,
}

impl Peeker {
    /// The queues with empty messages, of the sockets in `open`. The job must be frozen.
    pub(super) fn look(&mut self, open: &OpenSockets) -> io::Result<Vec<PeekedQueue>> {
        let sockets = with_bounds(&read_text("/proc/self/net/unix")?);
        let mut known = HashMap::new();
        let mut found = Vec::new();
        for (&inode, &(pid, fd)) in open.iter().filter(|(inode, _)| sockets.contains_key(inode)) {
            let Some(socket) = descriptors::open(pid, fd)? else { continue };
            let before = self.known.get(&inode).map_or(&[][..], Vec::as_slice);
            let seen = Look::at(socket.as_fd())?.queue(before)?;
            let messages = match seen {
                Some(seen) if seen.iter().all(|message| message.bytes > 0) => continue,
                Some(seen) => {
                    let is_unread = sockets[&inode] == Kind::Datagram && seen[0].bytes == 0;
                    let messages = Look::at(socket.as_fd())?.with_data(&seen, is_unread)?;
                    known.insert(inode, seen);
                    messages
                }
                None => {
                    known.insert(inode, before.to_vec());
                    None
                }
            };
            found.push(PeekedQueue { pid, fd, inode, messages });
        }
        self.known = known;
        Ok(found)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Datagram,
    Packets,
}

/// The unix sockets that keep the bounds of messages, by their inodes, from /proc/net/unix (proc_net(5)).
fn with_bounds(table: &str) -> HashMap<u64, Kind> {
    let socket = |line: &str| {
        let words: Vec<_> = line.split_whitespace().collect();
        let kind = match *words.get(4)? {
            "0002" => Kind::Datagram,
            "0005" => Kind::Packets,
            _ => return None,
        };
        Some((words.get(6)?.parse().ok()?, kind))
    };
    table.lines().skip(1).filter_map(socket).collect()
}

/// A socket while its queue is looked at. Its options are put back when this is dropped.
struct Look<'a> {
    socket: BorrowedFd<'a>,
    offset: libc::c_int,
    time_stamp: Option<libc::c_int>,
}

impl<'a> Look<'a> {
    fn at(socket: BorrowedFd<'a>) -> io::Result<Self> {
        let offset = option(socket, libc::SO_PEEK_OFF)?;
        // An older kernel does not know all of them.
        let is_set = |name: &libc::c_int| option(socket, *name).is_ok_and(|value| value != 0);
        let time_stamp = TIME_STAMPS.into_iter().find(is_set);
        Ok(Self { socket, offset, time_stamp })
    }

    /// All messages, of which `before` were known. `None` if it cannot be known where the empty ones are.
    fn queue(&self, before: &[Seen]) -> io::Result<Option<Vec<Seen>>> {
        set_option(self.socket, libc::SO_PEEK_OFF, NO_OFFSET)?;
        if peek(self.socket, &mut [])?.is_none() {
            return Ok(Some(Vec::new()));
        }
        set_option(self.socket, libc::SO_TIMESTAMPNS, 1)?;
        let first = peek(self.socket, &mut [])?.flatten();
        let again = peek(self.socket, &mut [])?.flatten();
        // The end of a connection has no time.
        let (Some(first), Some(again)) = (first, again) else { return Ok(Some(Vec::new())) };
        let visible = self.visible()?;
        let has_empty = [&[first], before, &visible].iter().any(|some| some.iter().any(|one| one.bytes == 0));
        Ok(match (first == again, has_empty) {
            (true, _) => merged(before, first, &visible),
            (false, true) => None,
            (false, false) => Some(visible),
        })
    }

    /// All messages but the empty ones that were seen before.
    fn visible(&self) -> io::Result<Vec<Seen>> {
        let (mut offset, mut found) = (0, Vec::new());
        loop {
            set_option(self.socket, libc::SO_PEEK_OFF, offset)?;
            let Some(message) = peek(self.socket, &mut [])?.flatten() else { return Ok(found) };
            offset += libc::c_int::try_from(message.bytes).map_err(io::Error::other)?;
            found.push(message);
        }
    }

    /// The messages, with their content if `is_unread`. `None` if that is too long, or has changed.
    fn with_data(&self, seen: &[Seen], is_unread: bool) -> io::Result<Option<Vec<PeekedMessage>>> {
        if is_unread && seen.iter().map(|message| message.bytes).sum::<usize>() > MOST_DATA_BYTES {
            return Ok(None);
        }
        // Only messages that are not empty are visible now.
        set_option(self.socket, libc::SO_PEEK_OFF, 0)?;
        set_option(self.socket, libc::SO_TIMESTAMPNS, 1)?;
        let mut messages = Vec::new();
        for &Seen { bytes, has_control, .. } in seen {
            let mut data = None;
            if is_unread && bytes > 0 {
                let buffer = data.insert(vec![0; bytes]);
                if peek(self.socket, buffer)?.flatten().is_none_or(|message| message.bytes != bytes) {
                    return Ok(None);
                }
            }
            messages.push(PeekedMessage { bytes, has_control, data });
        }
        Ok(Some(messages))
    }
}

impl Drop for Look<'_> {
    fn drop(&mut self) {
        let _ = set_option(self.socket, libc::SO_PEEK_OFF, self.offset);
        if self.time_stamp != Some(libc::SO_TIMESTAMPNS) {
            let _ = set_option(self.socket, libc::SO_TIMESTAMPNS, 0);
        }
        if let Some(name) = self.time_stamp {
            let _ = set_option(self.socket, name, 1);
        }
    }
}

/// All messages of a queue of which `before` were known: those that are left, from `first` on, and after them those that
/// are new. `visible` are all but the empty ones that were seen before.
fn merged(before: &[Seen], first: Seen, visible: &[Seen]) -> Option<Vec<Seen>> {
    let left = before.iter().position(|one| one.stamp == first.stamp);
    let mut all = left.map_or_else(|| vec![first], |at| before[at..].to_vec());
    let old: Vec<_> = all.iter().filter(|message| message.bytes > 0).copied().collect();
    all.extend(visible.strip_prefix(&old[..])?);
    Some(all)
}

/// What a peek finds: `None` if the queue is empty, and `Some(None)` at the end of a connection, or without time stamps.
/// `buffer` gets the content.
fn peek(socket: BorrowedFd, buffer: &mut [u8]) -> io::Result<Option<Option<Seen>>> {
    let mut control = [0_u64; CONTROL_WORDS];
    let mut part = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    // SAFETY: `msghdr` is plain data for which all zeroes is a value.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = &raw mut part;
    header.msg_iovlen = 1;
    header.msg_control = control.as_mut_ptr().cast();
    header.msg_controllen = size_of_val(&control);
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT | libc::MSG_TRUNC;
    // SAFETY: the header names `buffer` and `control` with their lengths. Both live until after the call, nobody else
    // uses them, and any bytes are values of both.
    let bytes = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut header, flags) };
    let Ok(bytes) = usize::try_from(bytes) else {
        let error = io::Error::last_os_error();
        // A socket for packets that listens, or is not connected yet, has no messages.
        let is_empty = matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::NotConnected);
        return if is_empty { Ok(None) } else { Err(error) };
    };
    // A control message (cmsg(3)) begins with its length, its level and its type.
    let [length, kind, stamp @ ..] = control;
    let level_and_type = [libc::SOL_SOCKET, libc::SCM_TIMESTAMPNS].map(i32::to_ne_bytes).concat();
    if header.msg_controllen < size_of_val(&control)
        || length != size_of_val(&control) as u64
        || kind.to_ne_bytes() != level_and_type[..]
    {
        return Ok(Some(None));
    }
    let has_control = header.msg_flags & libc::MSG_CTRUNC != 0;
    Ok(Some(Some(Seen { stamp, bytes, has_control })))
}

fn option(socket: BorrowedFd, name: libc::c_int) -> io::Result<libc::c_int> {
    let mut value: libc::c_int = 0;
    let mut bytes = libc::socklen_t::try_from(size_of_val(&value)).map_err(io::Error::other)?;
    let to = (&raw mut value).cast();
    // SAFETY: the kernel writes at most `bytes` bytes to `to`, which has room for them; any bytes make an integer.
    let result = unsafe { libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, name, to, &raw mut bytes) };
    if result == 0 { Ok(value) } else { Err(io::Error::last_os_error()) }
}

fn set_option(socket: BorrowedFd, name: libc::c_int, value: libc::c_int) -> io::Result<()> {
    let bytes = libc::socklen_t::try_from(size_of_val(&value)).map_err(io::Error::other)?;
    let from = (&raw const value).cast();
    // SAFETY: the kernel reads the `bytes` bytes of an integer that lives until after the call.
    let result = unsafe { libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, name, from, bytes) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair};
    use std::os::fd::OwnedFd;

    fn pair(kind: SocketType) -> (OwnedFd, OwnedFd) {
        socketpair(AddressFamily::UNIX, kind, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC, None).unwrap()
    }

    fn look(socket: &OwnedFd, before: &[Seen]) -> Vec<Seen> {
        Look::at(socket.as_fd()).unwrap().queue(before).unwrap().unwrap()
    }

    fn lengths(seen: &[Seen]) -> Vec<usize> {
        seen.iter().map(|message| message.bytes).collect()
    }

    #[test]
    fn empty_messages_are_found_again_and_nothing_else_changes() {
        for kind in [SocketType::DGRAM, SocketType::SEQPACKET] {
            let (sender, receiver) = pair(kind);
            let put = |text: &str| {
                send(&sender, text.as_bytes(), SendFlags::empty()).unwrap();
            };
            let get = || {
                let mut buffer = [0; 100];
                let (bytes, _) = recv(&receiver, &mut buffer[..], RecvFlags::empty()).unwrap();
                String::from_utf8_lossy(&buffer[..bytes]).into_owned()
            };
            assert_eq!(look(&receiver, &[]), []);
            ["", "", "hello", "", "x", ""].into_iter().for_each(put);
            let first = look(&receiver, &[]);
            assert_eq!(lengths(&first), [0, 0, 5, 0, 1, 0]);
            assert_eq!(look(&receiver, &first), first);
            assert_eq!((get(), get()), (String::new(), String::new()));
            put("x");
            put("");
            let second = look(&receiver, &first);
            assert_eq!(lengths(&second), [5, 0, 1, 0, 1, 0]);
            assert_eq!(["hello", "", "x", "", "x", ""].map(|_| get()), ["hello", "", "x", "", "x", ""]);
            assert_eq!(look(&receiver, &second), []);
            ["x", "", "x"].into_iter().for_each(put);
            assert_eq!(lengths(&look(&receiver, &second)), [1, 0, 1]);
        }
    }

    #[test]
    fn the_end_of_a_connection_is_no_message() {
        let (sender, receiver) = pair(SocketType::SEQPACKET);
        send(&sender, b"x", SendFlags::empty()).unwrap();
        send(&sender, b"", SendFlags::empty()).unwrap();
        drop(sender);
        assert_eq!(lengths(&look(&receiver, &[])), [1, 0]);
        let mut buffer = [0; 1];
        for _ in 0..2 {
            recv(&receiver, &mut buffer[..], RecvFlags::empty()).unwrap();
        }
        assert_eq!(look(&receiver, &[]), []);
    }

    #[test]
    fn options_of_the_socket_are_as_before() {
        for stamp in TIME_STAMPS.into_iter().map(Some).chain([None]) {
            let (sender, receiver) = pair(SocketType::DGRAM);
            if let Some(name) = stamp {
                set_option(receiver.as_fd(), name, 1).unwrap();
            }
            set_option(receiver.as_fd(), libc::SO_PEEK_OFF, 3).unwrap();
            send(&sender, b"", SendFlags::empty()).unwrap();
            send(&sender, b"hello", SendFlags::empty()).unwrap();
            let seen = look(&receiver, &[]);
            assert_eq!(lengths(&seen), [0, 5]);
            let messages = Look::at(receiver.as_fd()).unwrap().with_data(&seen, true).unwrap().unwrap();
            assert_eq!(messages[1].data.as_deref(), Some(&b"hello"[..]));
            assert_eq!(option(receiver.as_fd(), libc::SO_PEEK_OFF).unwrap(), 3);
            let set = TIME_STAMPS.into_iter().find(|&name| option(receiver.as_fd(), name).unwrap() != 0);
            assert_eq!(set, stamp);
        }
    }

    #[test]
    fn descriptors_in_a_message_are_noticed() {
        use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, sendmsg};
        let (sender, receiver) = pair(SocketType::DGRAM);
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let sent = [sender.as_fd()];
        assert!(control.push(SendAncillaryMessage::ScmRights(&sent)));
        sendmsg(&sender, &[io::IoSlice::new(b"")], &mut control, SendFlags::empty()).unwrap();
        send(&sender, b"", SendFlags::empty()).unwrap();
        let seen = look(&receiver, &[]);
        assert_eq!(seen.iter().map(|one| one.has_control).collect::<Vec<_>>(), [true, false]);
    }

    #[test]
    fn the_kernels_table_names_the_sockets() {
        let table = "Num       RefCount Protocol Flags    Type St Inode Path\n\
            0000000000000000: 00000002 00000000 00010000 0001 01 11 /run/a\n\
            0000000000000000: 00000003 00000000 00000000 0002 01 12\n\
            0000000000000000: 00000003 00000000 00000000 0005 03 13 @b\n";
        assert_eq!(with_bounds(table), HashMap::from([(12, Kind::Datagram), (13, Kind::Packets)]));
    }
}
