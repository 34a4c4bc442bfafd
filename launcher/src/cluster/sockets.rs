//! The TCP sockets of the network namespace, as `/proc/net/tcp` and `/proc/net/tcp6` list them.

use super::diag::end_connection;
use super::replicas;
use crate::sys::deadline::{NODE_CONNECTIONS_PATIENCE, NODE_CONNECTIONS_POLL_INTERVAL};
use std::collections::{BTreeSet, HashSet};
use std::fs;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::time::Instant;

const FIN_WAIT_1: u8 = 4;
const FIN_WAIT_2: u8 = 5;
const TIME_WAIT: u8 = 6;
const CLOSED: u8 = 7;
const LAST_ACK: u8 = 9;
const LISTENING: u8 = 10;
const CLOSING: u8 = 11;

/// A socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TcpSocket {
    /// Its own address.
    pub local: IpAddr,
    /// Its own port.
    pub port: u16,
    /// The other end.
    pub remote: IpAddr,
    /// The port there.
    pub remote_port: u16,
    state: u8,
    /// 0: no process has it.
    inode: u64,
}

impl TcpSocket {
    /// Whether packets of it leave the machine, or may come from outside.
    #[must_use]
    pub fn is_beyond_loopback(&self) -> bool {
        !self.local.to_canonical().is_loopback() && self.state != CLOSED
    }

    /// Whether it is connected.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        ![LISTENING, CLOSED].contains(&self.state)
    }

    /// Whether the kernel still works on it although no process has it: its connection is being established or closed.
    /// Such a socket is in no snapshot.
    #[must_use]
    pub fn is_unsettled(&self) -> bool {
        self.inode == 0 && ![FIN_WAIT_2, TIME_WAIT, CLOSED, LISTENING].contains(&self.state)
    }

    /// Whether its process has closed it, and the other end has not confirmed all data.
    #[must_use]
    pub fn is_closing(&self) -> bool {
        self.inode == 0 && [FIN_WAIT_1, LAST_ACK, CLOSING].contains(&self.state)
    }
}

/// The connections between the launchers of a job on several nodes, as this node sees them. None of them is the job's.
#[derive(Clone, Copy, Debug)]
pub struct LauncherConnections {
    /// Where node 0 listens.
    pub port: u16,
    /// The address of node 0; `None` at node 0.
    pub coordinator: Option<IpAddr>,
    /// Launchers hold replicas, and may be closing connections for them of an earlier start.
    pub has_replicas: bool,
}

impl LauncherConnections {
    /// Whether it is one of them.
    #[must_use]
    pub fn has(&self, socket: &TcpSocket) -> bool {
        let is_of_replicas =
            self.has_replicas && [socket.port, socket.remote_port].into_iter().all(replicas::has_port);
        is_of_replicas
            || match self.coordinator {
                None => socket.port == self.port,
                Some(address) => (socket.remote.to_canonical(), socket.remote_port) == (address, self.port),
            }
    }
}

/// All TCP sockets of the calling process's network namespace.
///
/// # Errors
/// When procfs cannot be read.
pub fn all() -> io::Result<Vec<TcpSocket>> {
    all_in(Path::new("/proc/self/net"))
}

fn all_in(net: &Path) -> io::Result<Vec<TcpSocket>> {
    let mut all = parse(&fs::read_to_string(net.join("tcp"))?);
    // A kernel without IPv6 does not have it.
    if let Ok(text) = fs::read_to_string(net.join("tcp6")) {
        all.extend(parse(&text));
    }
    Ok(all)
}

/// One that its process has closed, although the other end has not got all data, among those in the network namespace of the
/// process `pid`. The other end is one of `connections`, each with its own address and the remote one.
///
/// # Errors
/// When procfs cannot be read.
pub fn closing(pid: i32, connections: &[(SocketAddr, SocketAddr)]) -> io::Result<Option<TcpSocket>> {
    if connections.is_empty() {
        return Ok(None);
    }
    let all = all_in(Path::new(&format!("/proc/{pid}/net")))?;
    let address = |ip: IpAddr, port| SocketAddr::new(ip.to_canonical(), port);
    let other_end =
        |socket: &TcpSocket| (address(socket.remote, socket.remote_port), address(socket.local, socket.port));
    Ok(all.into_iter().find(|socket| socket.is_closing() && connections.contains(&other_end(socket))))
}

/// Those of the processes `pids` below `proc`, a directory of procfs.
///
/// # Errors
/// When procfs cannot be read. A process that has ended has none.
pub fn of_processes(proc: &Path, pids: &[i32]) -> io::Result<Vec<TcpSocket>> {
    let mut inodes = HashSet::new();
    for pid in pids {
        let Ok(entries) = fs::read_dir(proc.join(format!("{pid}/fd"))) else { continue };
        let links = entries.flatten().filter_map(|entry| fs::read_link(entry.path()).ok());
        inodes.extend(links.filter_map(|link| socket_inode(link.to_str()?)));
    }
    Ok(all()?.into_iter().filter(|socket| inodes.contains(&socket.inode)).collect())
}

/// The local ports of sockets that reach beyond the loopback interface.
#[must_use]
pub fn ports(sockets: &[TcpSocket]) -> BTreeSet<u16> {
    sockets.iter().filter(|socket| socket.is_beyond_loopback()).map(|socket| socket.port).collect()
}

/// The inodes of connections that reach beyond the loopback interface.
#[must_use]
pub fn connections(sockets: &[TcpSocket]) -> BTreeSet<u64> {
    let beyond = sockets.iter().filter(|socket| socket.is_beyond_loopback() && socket.is_connected());
    beyond.map(|socket| socket.inode).collect()
}

/// Waits until no connection with one of these local ports is left that no process has and the kernel still works on. After
/// a while those that are left are ended with a reset: after the network was broken, the kernel alone would need minutes.
///
/// # Errors
/// When procfs cannot be read, or such connections are left at the deadline.
pub fn await_settled(ports: &BTreeSet<u16>, deadline: Instant) -> io::Result<()> {
    if ports.is_empty() {
        return Ok(());
    }
    let is_left = |socket: &TcpSocket| {
        socket.is_unsettled() && socket.is_beyond_loopback() && ports.contains(&socket.port)
    };
    let patience = Instant::now() + NODE_CONNECTIONS_PATIENCE;
    while let Some(left) = all()?.into_iter().find(is_left) {
        if Instant::now() >= patience
            && let Err(error) = end_connection((left.local, left.port), (left.remote, left.remote_port))
        {
            tracing::debug!("a connection to {}, port {}, is left: {error}", left.remote, left.remote_port);
        }
        if Instant::now() >= deadline {
            let (remote, port) = (left.remote, left.remote_port);
            return Err(io::Error::other(format!("one to {remote}, port {port}, does not end")));
        }
        std::thread::sleep(NODE_CONNECTIONS_POLL_INTERVAL);
    }
    Ok(())
}

fn socket_inode(link: &str) -> Option<u64> {
    link.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
}

fn parse(text: &str) -> Vec<TcpSocket> {
    text.lines().skip(1).filter_map(line).collect()
}

fn line(line: &str) -> Option<TcpSocket> {
    let fields: Vec<_> = line.split_ascii_whitespace().collect();
    let (local, port) = end(fields.get(1)?)?;
    let (remote, remote_port) = end(fields.get(2)?)?;
    let state = u8::from_str_radix(fields.get(3)?, 16).ok()?;
    let inode = fields.get(9)?.parse().ok()?;
    Some(TcpSocket { local, port, remote, remote_port, state, inode })
}

/// An address in hexadecimal, in words of the machine's byte order, and a port.
fn end(text: &str) -> Option<(IpAddr, u16)> {
    let (address, port) = text.split_once(':')?;
    let word = |at: usize| u32::from_str_radix(address.get(at..at + 8)?, 16).ok();
    let address = match address.len() {
        8 => IpAddr::from(word(0)?.to_ne_bytes()),
        32 => {
            let words = [word(0)?, word(8)?, word(16)?, word(24)?].map(u32::to_ne_bytes);
            IpAddr::from(<[u8; 16]>::try_from(words.concat()).ok()?)
        }
        _ => return None,
    };
    Some((address, u16::from_str_radix(port, 16).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::time::Duration;

    #[test]
    fn own_sockets_are_found() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let me = std::process::id().cast_signed();
        let mine = of_processes(Path::new("/proc"), &[me]).unwrap();
        // Other connections of this machine may have one of the two ports.
        let ports = (stream.local_addr().unwrap().port(), port);
        let own = mine.iter().find(|socket| (socket.port, socket.remote_port) == ports).unwrap();
        assert!(own.local.is_loopback());
        assert!(own.is_connected() && !own.is_beyond_loopback() && !own.is_unsettled(), "{own:?}");
        assert!(mine.iter().any(|socket| socket.port == port && !socket.is_connected()));
        // Not accepted yet: no process has the other end.
        let is_other = |socket: &TcpSocket| (socket.remote_port, socket.port) == ports;
        let other = all().unwrap().into_iter().find(is_other).unwrap();
        assert!(other.is_unsettled(), "{other:?}");
        drop(listener);
    }

    #[test]
    fn data_that_nobody_has_read_keeps_a_closed_connection() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (local, remote) = (stream.local_addr().unwrap().port(), stream.peer_addr().unwrap().port());
        let find = || {
            let is_it = |socket: &TcpSocket| (socket.port, socket.remote_port) == (local, remote);
            all().unwrap().into_iter().find(is_it).unwrap()
        };
        stream.set_nonblocking(true).unwrap();
        while stream.write(&[7; 65536]).is_ok() {}
        assert!(!find().is_closing());
        drop(stream);
        assert!(find().is_closing() && find().is_unsettled(), "{:?}", find());
        let me = std::process::id().cast_signed();
        let [here, there] = [local, remote].map(|port| SocketAddr::new([127, 0, 0, 1].into(), port));
        let remotes = [(there, here)];
        assert!(closing(me, &[(here, here), (there, there)]).unwrap().is_none(), "of another connection");
        assert_eq!(closing(me, &remotes).unwrap().unwrap().remote_port, remote);
        assert!(closing(me, &[]).unwrap().is_none());
        let mut other = listener.accept().unwrap().0;
        io::copy(&mut other, &mut io::sink()).unwrap();
        // The last acknowledgement may be delayed.
        let end = Instant::now() + Duration::from_secs(10);
        while closing(me, &remotes).unwrap().is_some() {
            assert!(Instant::now() < end, "it is still there");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn any_line_is_read_or_left_out() {
        let v4 = "  0: 0200000A:1F90 0300000A:9C40 01 00000000:00000000 00:00000000 00000000 0 0 77 1 0 20 4 30 10 -1";
        let socket = line(v4).unwrap();
        if cfg!(target_endian = "little") {
            assert_eq!((socket.local.to_string(), socket.port), ("10.0.0.2".to_owned(), 8080));
            assert_eq!((socket.remote.to_string(), socket.inode), ("10.0.0.3".to_owned(), 77));
        }
        let v6 = "  1: 00000000000000000000000000000000:0016 00000000000000000000000000000000:0000 0A 0:0 0:0 0 0 0 5 1";
        assert!(line(v6).unwrap().is_beyond_loopback());
        ckpt_test_mutate::mutations(&[v4.as_bytes().to_vec(), v6.as_bytes().to_vec()], |bytes| {
            if let Ok(text) = std::str::from_utf8(bytes) {
                let _ = line(text);
            }
        });
    }
}
