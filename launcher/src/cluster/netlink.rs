//! Messages of nftables and of the kernel's socket diagnosis over netlink, as bytes. Numbers are those of the kernel's
//! `linux/netfilter/nf_tables.h`, `linux/netfilter/nfnetlink.h`, `linux/netlink.h`, `linux/sock_diag.h` and
//! `linux/inet_diag.h`.

use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType, bind, recv, sendto, socket_with,
};
use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::time::Duration;

/// The kernel answers at once.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
const HEADER_BYTES: usize = 16;
const NESTED: u16 = 0x8000;
const REQUEST: u16 = 1;
const ACK: u16 = 4;
/// The type of an answer: an error number, 0 for success.
const ERROR: u16 = 2;
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
        Self::of(rustix::net::netlink::NETFILTER)
    }

    fn of(protocol: Protocol) -> io::Result<Self> {
        let (family, kind) = (AddressFamily::NETLINK, SocketType::RAW);
        let socket = socket_with(family, kind, SocketFlags::CLOEXEC, Some(protocol))?;
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
        sendto(&self.0, &bytes, SendFlags::empty(), &SocketAddrNetlink::new(0, 0))?;
        let (mut answered, mut first) = (0, Ok(()));
        let mut buffer = vec![0; 64 << 10];
        while answered < batch.requests {
            let (received, _) = recv(&self.0, &mut buffer[..], RecvFlags::empty())?;
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
}

/// Has the kernel end the TCP connection between two addresses with a reset, whatever its state is.
///
/// # Errors
/// When there is none, or the kernel cannot do that (`CONFIG_INET_DIAG_DESTROY`).
pub(super) fn end_connection(local: (IpAddr, u16), remote: (IpAddr, u16)) -> io::Result<()> {
    const SOCK_DESTROY: u16 = 21;
    const TCP: u8 = 6;
    let family = if local.0.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let family = u8::try_from(family.as_raw()).expect("families of addresses are small");
    // struct inet_diag_req_v2, without its first two bytes: no extensions, any state.
    let mut body = vec![0, 0];
    body.extend_from_slice(&u32::MAX.to_ne_bytes());
    for (_, port) in [local, remote] {
        body.extend_from_slice(&port.to_be_bytes());
    }
    for (address, _) in [local, remote] {
        let mut bytes = [0; 16];
        match address {
            IpAddr::V4(address) => bytes[..4].copy_from_slice(&address.octets()),
            IpAddr::V6(address) => bytes = address.octets(),
        }
        body.extend_from_slice(&bytes);
    }
    // Any interface, any cookie.
    body.extend_from_slice(&0_u32.to_ne_bytes());
    body.extend_from_slice(&[0xff; 8]);
    let mut request = Vec::new();
    let length = u32::try_from(HEADER_BYTES + 2 + body.len()).expect("messages are short");
    request.extend_from_slice(&length.to_ne_bytes());
    request.extend_from_slice(&SOCK_DESTROY.to_ne_bytes());
    request.extend_from_slice(&(REQUEST | ACK).to_ne_bytes());
    request.extend_from_slice(&[0; 8]);
    request.extend_from_slice(&[family, TCP]);
    request.extend_from_slice(&body);
    let Socket(socket) = Socket::of(rustix::net::netlink::SOCK_DIAG)?;
    sendto(&socket, &request, SendFlags::empty(), &SocketAddrNetlink::new(0, 0))?;
    let mut buffer = vec![0; 4096];
    let (received, _) = recv(&socket, &mut buffer[..], RecvFlags::empty())?;
    match answers(&buffer[..received]).first() {
        Some((_, 0)) => Ok(()),
        Some((_, error)) => Err(io::Error::from_raw_os_error(*error)),
        None => Err(io::Error::other("the kernel gives no answer")),
    }
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
    fn a_connection_is_ended() {
        use std::io::Read as _;
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let mut own = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut other = listener.accept().unwrap().0;
        let ends = [own.local_addr().unwrap(), own.peer_addr().unwrap()].map(|end| (end.ip(), end.port()));
        match end_connection(ends[0], ends[1]) {
            Ok(()) => {
                assert!(own.read(&mut [0]).is_err());
                assert!(other.read(&mut [0]).is_err());
                assert!(end_connection(ends[0], ends[1]).is_err(), "it has gone");
            }
            // The rights of the test, or the kernel.
            Err(error) => {
                let known = [libc::EPERM, libc::EOPNOTSUPP, libc::ENOENT];
                assert!(error.raw_os_error().is_some_and(|number| known.contains(&number)), "{error}");
            }
        }
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
        ckpt_test_mutate::mutations(&[both], |bytes| drop(answers(bytes)));
    }
}
