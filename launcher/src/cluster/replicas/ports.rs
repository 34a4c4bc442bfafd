//! The ports of connections for replicas: such that the kernel gives to no connection of a job, by default. A resume needs the
//! ports of the connections in the snapshot, and drops packets that are for them.

use rustix::io::Errno;
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, connect as connect_socket, socket_with};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

/// Above those that the kernel chooses from (net.ipv4.ip_local_port_range, up to 60999), and those of coordinators under Slurm.
const FIRST: u16 = 65000;
const NUMBER: u16 = 536;
/// Whether it is one of them.
pub fn has_port(port: u16) -> bool {
    (FIRST..=FIRST + (NUMBER - 1)).contains(&port)
}

/// So many are tried.
const TRIES: u16 = 100;

/// Ports to try, from anywhere.
fn candidates() -> impl Iterator<Item = u16> {
    let from = RandomState::new().hash_one(std::process::id());
    let below = move |step: u16| from.wrapping_add(u64::from(step)) % u64::from(NUMBER);
    (0..TRIES).filter_map(move |step| Some(FIRST + u16::try_from(below(step)).ok()?))
}

/// Listens at a free one, at all addresses of the machine.
///
/// # Errors
/// When the kernel refuses.
pub fn listen() -> io::Result<TcpListener> {
    let mut failure = io::Error::from(ErrorKind::AddrInUse);
    for port in candidates() {
        let any = [IpAddr::from(Ipv6Addr::UNSPECIFIED), IpAddr::from(Ipv4Addr::UNSPECIFIED)];
        match TcpListener::bind(&any.map(|address| SocketAddr::new(address, port))[..]) {
            Err(error) if error.kind() == ErrorKind::AddrInUse => failure = error,
            bound => return bound,
        }
    }
    Err(failure)
}

/// Connects from a free one.
///
/// # Errors
/// When there is no connection within `timeout`.
pub fn connect(to: SocketAddr, timeout: Duration) -> io::Result<TcpStream> {
    let (family, any) = match to {
        SocketAddr::V4(_) => (AddressFamily::INET, IpAddr::from(Ipv4Addr::UNSPECIFIED)),
        SocketAddr::V6(_) => (AddressFamily::INET6, IpAddr::from(Ipv6Addr::UNSPECIFIED)),
    };
    let mut failure = io::Error::from(ErrorKind::AddrInUse);
    for port in candidates() {
        let socket = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        // Also limits the time to connect.
        sockopt::set_socket_timeout(&socket, Timeout::Send, Some(timeout))?;
        let connected =
            bind(&socket, &SocketAddr::new(any, port)).and_then(|()| connect_socket(&socket, &to));
        match connected {
            Ok(()) => return Ok(socket.into()),
            Err(error @ (Errno::ADDRINUSE | Errno::ADDRNOTAVAIL | Errno::INTR)) => failure = error.into(),
            Err(Errno::INPROGRESS | Errno::AGAIN) => return Err(ErrorKind::TimedOut.into()),
            Err(error) => return Err(error.into()),
        }
    }
    Err(failure)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ends_have_ports_that_the_kernel_does_not_choose() {
        let listeners: Vec<_> = (0..20).map(|_| listen().unwrap()).collect();
        for listener in &listeners {
            let port = listener.local_addr().unwrap().port();
            let to = SocketAddr::from(([127, 0, 0, 1], port));
            let stream = connect(to, Duration::from_secs(60)).unwrap();
            assert_eq!(stream.peer_addr().unwrap().port(), port);
            assert!(has_port(port) && has_port(stream.local_addr().unwrap().port()));
        }
        assert!(!has_port(60999) && has_port(65535));
        let port = listeners[0].local_addr().unwrap().port();
        drop(listeners);
        let refused = connect(SocketAddr::from(([127, 0, 0, 1], port)), Duration::from_secs(60)).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
    }
}
