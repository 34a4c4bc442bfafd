//! What the kernel says of TCP connections and of the machine's addresses, over netlink. Numbers are those of the kernel's
//! `linux/sock_diag.h`, `linux/inet_diag.h`, `linux/tcp.h`, `linux/rtnetlink.h`, `linux/if_addr.h` and `linux/if_link.h`.

use super::netlink::{Socket, attributes, field};
use rustix::net::AddressFamily;
use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const SOCK_DESTROY: u16 = 21;
const TCP: u8 = 6;
/// The attribute with `struct tcp_info`.
const INFO: u16 = 2;
/// All states but that of a listener.
const CONNECTED: u32 = !(1 << 10);
pub(super) const RTM_GETLINK: u16 = 18;
const IFLA_MTU: u16 = 4;
const RTM_GETADDR: u16 = 22;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;

/// A TCP connection, and what its end here knows of the other one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Flow {
    pub(super) local: SocketAddr,
    pub(super) remote: SocketAddr,
    /// The kernel's number of the state.
    pub(super) state: u8,
    /// 0: no process has it.
    pub(super) inode: u64,
    /// Bytes that were sent, or are to be sent, and are not acknowledged.
    pub(super) unacknowledged: u32,
    /// Probes of the window or of the connection without an answer.
    pub(super) probes: u8,
    /// Time since an acknowledgement has come that fits. Packets of an end with other sequence numbers have none.
    pub(super) acknowledged: Duration,
    /// Time since data has come.
    pub(super) received: Duration,
}

/// All TCP connections of the network namespace of the calling thread.
///
/// # Errors
/// When the kernel has no socket diagnosis.
pub(super) fn flows() -> io::Result<Vec<Flow>> {
    let socket = Socket::of(Some(rustix::net::netlink::SOCK_DIAG))?;
    let mut found = Vec::new();
    for family in [AddressFamily::INET, AddressFamily::INET6] {
        // struct inet_diag_req_v2 without an address.
        let mut request = vec![number_of(family), TCP, 1 << (INFO - 1), 0];
        request.extend_from_slice(&CONNECTED.to_ne_bytes());
        request.resize(request.len() + 48, 0);
        for message in socket.dump(SOCK_DIAG_BY_FAMILY, &request)? {
            found.extend(flow(&message));
        }
    }
    Ok(found)
}

/// Reads `struct inet_diag_msg` and `struct tcp_info`.
fn flow(message: &[u8]) -> Option<Flow> {
    const ATTRIBUTES: usize = 72;
    let end = |address: usize, port: usize| {
        let port = u16::from_be_bytes(field(message, port).ok()?);
        let address = match AddressFamily::from_raw(message.first().copied()?.into()) {
            AddressFamily::INET => IpAddr::from(field::<4>(message, address).ok()?),
            AddressFamily::INET6 => IpAddr::from(field::<16>(message, address).ok()?),
            _ => return None,
        };
        Some(SocketAddr::new(address.to_canonical(), port))
    };
    let inode = u32::from_ne_bytes(field(message, 68).ok()?).into();
    let (_, info) = attributes(message.get(ATTRIBUTES..)?).into_iter().find(|(kind, _)| *kind == INFO)?;
    let word = |at: usize| Some(u32::from_ne_bytes(field(info, at).ok()?));
    let ago = |at: usize| Some(Duration::from_millis(word(at)?.into()));
    Some(Flow {
        local: end(8, 4)?,
        remote: end(24, 6)?,
        state: *message.get(1)?,
        inode,
        unacknowledged: u32::from_ne_bytes(field(message, 60).ok()?),
        probes: *info.get(3)?,
        received: ago(52)?,
        acknowledged: ago(56)?,
    })
}

/// Has the kernel end the TCP connection between two addresses with a reset, whatever its state is.
///
/// # Errors
/// When there is none, or the kernel cannot do that (`CONFIG_INET_DIAG_DESTROY`).
pub(super) fn end_connection(local: (IpAddr, u16), remote: (IpAddr, u16)) -> io::Result<()> {
    let family = if local.0.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    // struct inet_diag_req_v2: no extensions, any state.
    let mut request = vec![number_of(family), TCP, 0, 0];
    request.extend_from_slice(&u32::MAX.to_ne_bytes());
    for (_, port) in [local, remote] {
        request.extend_from_slice(&port.to_be_bytes());
    }
    for (address, _) in [local, remote] {
        let mut bytes = [0; 16];
        match address {
            IpAddr::V4(address) => bytes[..4].copy_from_slice(&address.octets()),
            IpAddr::V6(address) => bytes = address.octets(),
        }
        request.extend_from_slice(&bytes);
    }
    // Any interface, any cookie.
    request.extend_from_slice(&0_u32.to_ne_bytes());
    request.extend_from_slice(&[0xff; 8]);
    Socket::of(Some(rustix::net::netlink::SOCK_DIAG))?.call(SOCK_DESTROY, 0, &request)
}

/// The addresses of the machine, without those of its loopback.
///
/// # Errors
/// When the kernel does not say them.
pub(super) fn addresses() -> io::Result<BTreeSet<IpAddr>> {
    let socket = Socket::of(None)?;
    // struct ifaddrmsg: all families and interfaces.
    let messages = socket.dump(RTM_GETADDR, &[0; 8])?;
    let found = messages.iter().filter_map(|message| address(message));
    Ok(found.filter(|address| !address.is_loopback()).collect())
}

/// Reads `struct ifaddrmsg`. Of a link between two machines, IFA_ADDRESS is the other end.
fn address(message: &[u8]) -> Option<IpAddr> {
    let all = attributes(message.get(8..)?);
    let bytes = of_kind(&all, IFA_LOCAL).or_else(|| of_kind(&all, IFA_ADDRESS))?;
    match bytes.len() {
        4 => Some(IpAddr::from(<[u8; 4]>::try_from(bytes).ok()?)),
        16 => Some(IpAddr::from(<[u8; 16]>::try_from(bytes).ok()?)),
        _ => None,
    }
}

/// How many bytes the packets may have of the interface with this address; `None` if there is none.
///
/// # Errors
/// When the kernel does not say it.
pub(super) fn most_packet_bytes(of: IpAddr) -> io::Result<Option<u32>> {
    let socket = Socket::of(None)?;
    let number = |message: &[u8]| field(message, 4).map(u32::from_ne_bytes);
    let with_address = socket.dump(RTM_GETADDR, &[0; 8])?;
    let Some(interface) = with_address.iter().find(|message| address(message) == Some(of)) else {
        return Ok(None);
    };
    let interface = number(interface)?;
    // struct ifinfomsg: all interfaces.
    let all = socket.dump(RTM_GETLINK, &[0; 16])?;
    let Some(link) = all.iter().find(|message| number(message).is_ok_and(|number| number == interface))
    else {
        return Ok(None);
    };
    let found = attributes(link.get(16..).unwrap_or_default());
    let bytes = of_kind(&found, IFLA_MTU).and_then(|bytes| bytes.try_into().ok());
    Ok(bytes.map(u32::from_ne_bytes))
}

pub(super) fn of_kind<'a>(all: &[(u16, &'a [u8])], wanted: u16) -> Option<&'a [u8]> {
    all.iter().find(|(kind, _)| *kind == wanted).map(|(_, bytes)| *bytes)
}

pub(super) fn number_of(family: AddressFamily) -> u8 {
    u8::try_from(family.as_raw()).expect("families of addresses are small")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read as _, Write as _};
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn a_connection_is_described() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut own = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut other = listener.accept().unwrap().0;
        own.write_all(b"x").unwrap();
        other.read_exact(&mut [0]).unwrap();
        let all = flows().unwrap();
        let flow = all.iter().find(|flow| flow.local == own.local_addr().unwrap()).unwrap();
        assert_eq!((flow.remote, flow.state), (own.peer_addr().unwrap(), 1));
        assert_ne!(flow.inode, 0);
        assert_eq!(flow.probes, 0);
        assert!(!all.iter().any(|flow| flow.state == 10), "listeners are left out");
    }

    #[test]
    fn connections_of_ipv6_are_described() {
        // Not every machine has it.
        let Ok(listener) = TcpListener::bind("[::1]:0") else { return };
        let own = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert!(flows().unwrap().iter().any(|flow| flow.local == own.local_addr().unwrap()));
    }

    #[test]
    fn the_machines_addresses_can_be_bound() {
        for address in addresses().unwrap() {
            // Those of a link need the number of its interface.
            let is_of_a_link = matches!(address, IpAddr::V6(six) if six.is_unicast_link_local());
            let bound = std::net::UdpSocket::bind((address, 0));
            assert!(is_of_a_link || bound.is_ok(), "{address}: {bound:?}");
        }
    }

    #[test]
    fn a_connection_is_ended() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut own = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
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
    fn any_message_is_read_or_left_out() {
        let mut message = vec![2, 1, 0, 0, 0, 80, 0, 90];
        message.resize(72, 1);
        message.extend_from_slice(&[68, 0, 2, 0]);
        message.resize(72 + 68, 3);
        let read = flow(&message).unwrap();
        assert_eq!((read.local.to_string(), read.remote.port()), ("1.1.1.1:80".to_owned(), 90));
        assert_eq!((read.unacknowledged, read.probes), (0x0101_0101, 3));
        let of_interface = [&[2, 24, 0, 0, 1, 0, 0, 0][..], &[8, 0, 2, 0, 10, 0, 0, 1]].concat();
        assert_eq!(address(&of_interface).unwrap().to_string(), "10.0.0.1");
        ckpt_test_mutate::mutations(&[message, of_interface], |bytes| {
            let _ = (flow(bytes), address(bytes));
        });
    }
}
