//! Messages over netlink, as bytes: those of nftables, and requests to other parts of the kernel. Numbers are those of the
//! kernel's `linux/netfilter/nf_tables.h`, `linux/netfilter/nfnetlink.h` and `linux/netlink.h`.

use rustix::io::retry_on_intr;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType, bind, recv, sendto, socket_with,
};
use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

/// The kernel answers at once.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
const HEADER_BYTES: usize = 16;
const NESTED: u16 = 0x8000;
const REQUEST: u16 = 1;
const ACK: u16 = 4;
/// All that there is, in several messages.
const DUMP: u16 = 0x300;
/// The type of an answer: an error number, 0 for success.
const ERROR: u16 = 2;
/// The type of the message after the last one of a dump.
const DONE: u16 = 3;
const BATCH_BEGIN: u16 = 0x10;
const BATCH_END: u16 = 0x11;
const SUBSYSTEM: u16 = 10;
/// Tables for IPv4 and IPv6 together.
const FAMILY_INET: u8 = 1;

/// A list of attributes.
#[derive(Clone, Debug, Default)]
pub(super) struct Attributes(Vec<u8>);

impl Attributes {
    /// Adds an attribute with these bytes.
    pub(super) fn bytes(mut self, kind: u16, value: &[u8]) -> Self {
        let length = u16::try_from(value.len() + 4).expect("attributes are short");
        self.0.extend_from_slice(&length.to_ne_bytes());
        self.0.extend_from_slice(&kind.to_ne_bytes());
        self.0.extend_from_slice(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        self
    }

    /// Adds a number in network byte order.
    pub(super) fn number(self, kind: u16, value: u32) -> Self {
        self.bytes(kind, &value.to_be_bytes())
    }

    /// Adds a text.
    pub(super) fn text(self, kind: u16, value: &str) -> Self {
        self.bytes(kind, &[value.as_bytes(), &[0]].concat())
    }

    /// Adds attributes as one attribute.
    pub(super) fn nested(self, kind: u16, value: &Self) -> Self {
        self.bytes(kind | NESTED, &value.0)
    }

    /// The body of a request: what comes before the attributes, and these.
    pub(super) fn after(&self, start: &[u8]) -> Vec<u8> {
        [start, &self.0].concat()
    }
}

/// Requests that the kernel performs all or none of.
#[derive(Debug, Default)]
pub(super) struct Batch {
    bytes: Vec<u8>,
    /// Number of the requests, which all get an answer.
    requests: u32,
}

impl Batch {
    /// Adds a request of nftables, of this number and with these flags.
    pub(super) fn request(&mut self, number: u16, flags: u16, attributes: &Attributes) {
        self.requests += 1;
        let kind = SUBSYSTEM << 8 | number;
        message(
            &mut self.bytes,
            (kind, flags | REQUEST | ACK, self.requests),
            (FAMILY_INET, 0),
            &attributes.0,
        );
    }
}

fn message(
    to: &mut Vec<u8>,
    (kind, flags, sequence): (u16, u16, u32),
    (family, resource): (u8, u16),
    body: &[u8],
) {
    let length = u32::try_from(HEADER_BYTES + 4 + body.len()).expect("messages are short");
    to.extend_from_slice(&length.to_ne_bytes());
    to.extend_from_slice(&kind.to_ne_bytes());
    to.extend_from_slice(&flags.to_ne_bytes());
    to.extend_from_slice(&sequence.to_ne_bytes());
    to.extend_from_slice(&[0; 4]);
    to.extend_from_slice(&[family, 0]);
    to.extend_from_slice(&resource.to_be_bytes());
    to.extend_from_slice(body);
}

/// A socket of netfilter in the network namespace of the calling thread. Tables that were made through it with an owner
/// end with it.
#[derive(Debug)]
pub(super) struct Socket(OwnedFd);

impl Socket {
    /// Opens one.
    ///
    /// # Errors
    /// When the kernel has no netfilter.
    pub(super) fn open() -> io::Result<Self> {
        Self::of(Some(rustix::net::netlink::NETFILTER))
    }

    /// Opens one for another part of the kernel; `None` is NETLINK_ROUTE.
    ///
    /// # Errors
    /// When the kernel does not have that.
    pub(super) fn of(protocol: Option<Protocol>) -> io::Result<Self> {
        let (family, kind) = (AddressFamily::NETLINK, SocketType::RAW);
        let socket = socket_with(family, kind, SocketFlags::CLOEXEC, protocol)?;
        bind(&socket, &SocketAddrNetlink::new(0, 0))?;
        set_socket_timeout(&socket, Timeout::Recv, Some(ANSWER_TIMEOUT))?;
        Ok(Self(socket))
    }

    /// Performs the requests.
    ///
    /// # Errors
    /// The first error of the kernel. Nothing was performed then.
    pub(super) fn perform(&self, batch: &Batch) -> io::Result<()> {
        let mut bytes = Vec::new();
        message(&mut bytes, (BATCH_BEGIN, REQUEST, 0), (0, SUBSYSTEM), &[]);
        bytes.extend_from_slice(&batch.bytes);
        message(&mut bytes, (BATCH_END, REQUEST, batch.requests + 1), (0, SUBSYSTEM), &[]);
        self.send_bytes(&bytes)?;
        let (mut answered, mut first) = (0, Ok(()));
        let mut buffer = vec![0; 64 << 10];
        while answered < batch.requests {
            let received = self.receive(&mut buffer)?;
            for (sequence, error) in answers(&buffer[..received]) {
                answered += 1;
                if error != 0 && first.is_ok() {
                    first = Err(io::Error::from_raw_os_error(error));
                }
                // The batch as a whole was refused.
                if error != 0 && sequence == 0 {
                    return first;
                }
            }
        }
        first
    }

    /// Performs one request, with these flags.
    ///
    /// # Errors
    /// The kernel's.
    pub(super) fn call(&self, kind: u16, flags: u16, body: &[u8]) -> io::Result<()> {
        self.send(kind, flags | REQUEST | ACK, body)?;
        let mut buffer = vec![0; 4096];
        let received = self.receive(&mut buffer)?;
        match answers(&buffer[..received]).first() {
            Some((_, 0)) => Ok(()),
            Some((_, error)) => Err(io::Error::from_raw_os_error(*error)),
            None => Err(io::Error::other("the kernel gives no answer")),
        }
    }

    /// The contents of the messages of this type with which the kernel answers a request for a list.
    ///
    /// # Errors
    /// The kernel's.
    pub(super) fn dump(&self, kind: u16, body: &[u8]) -> io::Result<Vec<Vec<u8>>> {
        self.send(kind, REQUEST | DUMP, body)?;
        let (mut found, mut buffer) = (Vec::new(), vec![0; 64 << 10]);
        loop {
            let received = self.receive(&mut buffer)?;
            for (kind_of_answer, content) in messages(&buffer[..received]) {
                match kind_of_answer {
                    DONE => return Ok(found),
                    ERROR => {
                        let number = i32::from_ne_bytes(field(content, 0)?).wrapping_neg();
                        return Err(io::Error::from_raw_os_error(number));
                    }
                    _ => found.push(content.to_vec()),
                }
            }
        }
    }

    fn send(&self, kind: u16, flags: u16, body: &[u8]) -> io::Result<()> {
        let mut request = Vec::new();
        let length = u32::try_from(HEADER_BYTES + body.len()).expect("messages are short");
        request.extend_from_slice(&length.to_ne_bytes());
        request.extend_from_slice(&kind.to_ne_bytes());
        request.extend_from_slice(&flags.to_ne_bytes());
        request.extend_from_slice(&[0; 8]);
        request.extend_from_slice(body);
        self.send_bytes(&request)
    }

    fn send_bytes(&self, bytes: &[u8]) -> io::Result<()> {
        retry_on_intr(|| sendto(&self.0, bytes, SendFlags::empty(), &SocketAddrNetlink::new(0, 0)))?;
        Ok(())
    }

    /// The number of bytes that were received.
    fn receive(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let (received, _) = retry_on_intr(|| recv(&self.0, &mut *buffer, RecvFlags::empty()))?;
        Ok(received)
    }
}

/// Bytes of a message of the kernel.
///
/// # Errors
/// It is too short.
pub(super) fn field<const N: usize>(bytes: &[u8], at: usize) -> io::Result<[u8; N]> {
    let found = at.checked_add(N).and_then(|end| bytes.get(at..end)?.try_into().ok());
    found.ok_or_else(|| io::Error::other("a message of the kernel is too short"))
}

/// The messages in what the kernel has sent, with their types.
fn messages(mut bytes: &[u8]) -> Vec<(u16, &[u8])> {
    let mut found = Vec::new();
    while let (Ok(length), Ok(kind)) = (field(bytes, 0), field(bytes, 4)) {
        let length = u32::from_ne_bytes(length) as usize;
        let Some(content) = bytes.get(HEADER_BYTES..length) else { break };
        found.push((u16::from_ne_bytes(kind), content));
        let Some(rest) = bytes.get(length.next_multiple_of(4)..) else { break };
        bytes = rest;
    }
    found
}

/// The attributes in a part of a message, with their types.
pub(super) fn attributes(mut bytes: &[u8]) -> Vec<(u16, &[u8])> {
    let mut found = Vec::new();
    while let (Ok(length), Ok(kind)) = (field(bytes, 0), field(bytes, 2)) {
        let length = usize::from(u16::from_ne_bytes(length));
        let Some(content) = bytes.get(4..length) else { break };
        found.push((u16::from_ne_bytes(kind) & !NESTED, content));
        let Some(rest) = bytes.get(length.next_multiple_of(4)..) else { break };
        bytes = rest;
    }
    found
}

/// The sequence numbers and error numbers of answers.
fn answers(mut bytes: &[u8]) -> Vec<(u32, i32)> {
    let word =
        |bytes: &[u8], at: usize| Some(<[u8; 4]>::try_from(bytes.get(at..at + 4)?).expect("four bytes"));
    let mut found = Vec::new();
    while let Some(length) = word(bytes, 0).map(|word| u32::from_ne_bytes(word) as usize) {
        let kind = bytes.get(4..6).map(|kind| u16::from_ne_bytes([kind[0], kind[1]]));
        if kind == Some(ERROR)
            && let (Some(sequence), Some(error)) = (word(bytes, 8), word(bytes, HEADER_BYTES))
        {
            found.push((u32::from_ne_bytes(sequence), i32::from_ne_bytes(error).wrapping_neg()));
        }
        let Some(rest) = bytes.get(length.next_multiple_of(4)..).filter(|_| length >= HEADER_BYTES) else {
            break;
        };
        bytes = rest;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_padded_and_nested() {
        let inner = Attributes::default().text(1, "ab");
        assert_eq!(inner.0, [7, 0, 1, 0, b'a', b'b', 0, 0]);
        let outer = Attributes::default().nested(2, &inner).number(3, 0x0102);
        assert_eq!(outer.0, [&[12, 0, 2, 0x80], &inner.0[..], &[8, 0, 3, 0, 0, 0, 1, 2]].concat());
    }

    #[test]
    fn any_answer_is_read() {
        let answer = |sequence: u32, error: i32| {
            let mut bytes = Vec::new();
            message(&mut bytes, (ERROR, 0, sequence), (0, 0), &[]);
            bytes[HEADER_BYTES..].copy_from_slice(&(-error).to_ne_bytes());
            bytes
        };
        let both = [answer(1, 0), answer(2, 17)].concat();
        assert_eq!(answers(&both), [(1, 0), (2, 17)]);
        ckpt_test_mutate::mutations(&[both], |bytes| {
            drop(answers(bytes));
            messages(bytes).into_iter().for_each(|(_, content)| drop(attributes(content)));
        });
    }

    #[test]
    fn attributes_are_read_as_they_are_written() {
        let written = Attributes::default().text(1, "ab").number(2, 3).nested(4, &Attributes::default());
        let expected: [(u16, &[u8]); 3] = [(1, b"ab\0"), (2, &[0, 0, 0, 3]), (4, &[])];
        assert_eq!(attributes(&written.0), expected);
    }

    #[test]
    fn any_attributes_are_read_or_left_out() {
        let written = Attributes::default().text(1, "ab").number(2, 3).nested(4, &Attributes::default());
        ckpt_test_mutate::mutations(&[written.0], |bytes| drop(attributes(bytes)));
    }
}
