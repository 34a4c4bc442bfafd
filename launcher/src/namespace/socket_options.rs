//! Options of the job's sockets that CRIU 4.2.1 does not save. They are read while the job is frozen, and compared with
//! those of a new socket of the same kind; what differs is set again in a resume.

mod table;

use super::descriptors::{self, OpenSockets};
use ckpt_snapshot::{SocketOption, SocketOptions};
use std::collections::{BTreeMap, HashMap};
use std::ffi::{CString, c_int};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Instant;
use table::{Row, TABLE, Value};

/// The most that an option or the name of an interface has, bytes.
const MOST_BYTES: usize = 16;
/// The largest TCP_MAXSEG that the kernel accepts (MAX_TCP_WINDOW in net/tcp.h). A socket that was connected once may
/// have a larger one.
const LARGEST_SEGMENT: c_int = 32_767;

/// A connection cannot set these. The kernel keeps properties of its first packet there (`tcp_v4_syn_recv_sock` in
/// net/ipv4/tcp_ipv4.c).
const NOT_OF_STREAMS: [&str; 4] =
    ["IP_MULTICAST_IF", "IP_MULTICAST_TTL", "IPV6_MULTICAST_IF", "IPV6_MULTICAST_HOPS"];

/// The options that differ from those of a new socket. The job must be frozen. Sockets that come after `deadline` are not
/// asked, nor are those that have other errors: their number is returned too.
pub(super) fn read(open: &OpenSockets, deadline: Instant) -> (Vec<SocketOptions>, usize) {
    let mut defaults = HashMap::new();
    let (mut found, mut unread) = (Vec::new(), 0);
    for &(pid, fd) in open.values() {
        if Instant::now() >= deadline {
            unread += 1;
            continue;
        }
        match descriptors::open(pid, fd) {
            Ok(Some(socket)) => {
                let options = differing(socket.as_fd(), &mut defaults);
                if !options.is_empty() {
                    found.push(SocketOptions { pid, fd, options });
                }
            }
            Ok(None) => {}
            Err(_) => unread += 1,
        }
    }
    (found, unread)
}

/// What decides which options a socket has.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Kind {
    family: c_int,
    socket_type: c_int,
    protocol: c_int,
}

impl Kind {
    fn of(socket: BorrowedFd) -> io::Result<Self> {
        let [family, socket_type, protocol] = [libc::SO_DOMAIN, libc::SO_TYPE, libc::SO_PROTOCOL]
            .map(|number| int(&get(socket, libc::SOL_SOCKET, number, size_of::<c_int>())?));
        Ok(Self { family: family?, socket_type: socket_type?, protocol: protocol? })
    }

    /// The options of a new socket: those that it has at all. None if there cannot be one.
    fn defaults(self) -> Vec<(&'static Row, Vec<u8>)> {
        let known = [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK, libc::AF_PACKET];
        if !known.contains(&self.family) {
            return Vec::new();
        }
        // With a protocol, it would receive packets.
        let protocol = if self.family == libc::AF_PACKET { 0 } else { self.protocol };
        // SAFETY: a plain system call on integers.
        let socket = unsafe { libc::socket(self.family, self.socket_type | libc::SOCK_CLOEXEC, protocol) };
        if socket < 0 {
            return Vec::new();
        }
        // SAFETY: the call has just returned the descriptor, and nothing else has it.
        let socket = unsafe { OwnedFd::from_raw_fd(socket) };
        let is_used =
            |row: &Row| self.socket_type != libc::SOCK_STREAM || !NOT_OF_STREAMS.contains(&row.name);
        let has = |row: &'static Row| Some((row, value(socket.as_fd(), row).ok()?));
        TABLE.iter().filter(|row| is_used(row)).filter_map(has).collect()
    }
}

fn differing(
    socket: BorrowedFd,
    defaults: &mut HashMap<Kind, Vec<(&'static Row, Vec<u8>)>>,
) -> Vec<SocketOption> {
    let Ok(kind) = Kind::of(socket) else { return Vec::new() };
    let defaults = defaults.entry(kind).or_insert_with(|| kind.defaults());
    let is_connected = rustix::net::getpeername(socket).is_ok();
    let mut options = Vec::new();
    for (row, default) in defaults {
        if row.value == Value::Unconnected && is_connected {
            continue;
        }
        let Some(value) = value(socket, row).ok().filter(|value| value != default) else { continue };
        if let Some(value) = saved(row, value, kind) {
            options.push(SocketOption { level: row.level, name: row.number, value });
        }
    }
    options
}

/// The value to be saved.
fn saved(row: &Row, value: Vec<u8>, kind: Kind) -> Option<Vec<u8>> {
    let number = int(&value);
    match (row.name, row.value) {
        ("TCP_MAXSEG", _) => number.is_ok_and(|number| number <= LARGEST_SEGMENT).then_some(value),
        // What waits in the queue is lost.
        ("SO_PEEK_OFF", _) if [libc::IPPROTO_UDP, libc::IPPROTO_UDPLITE].contains(&kind.protocol) => {
            Some(number.ok()?.min(0).to_ne_bytes().to_vec())
        }
        (_, Value::Interface) => interface_name(number.ok()?),
        (_, Value::InterfaceInNetworkOrder) => interface_name(c_int::from_be(number.ok()?)),
        _ => Some(value),
    }
}

/// Sets the options again. Returns a warning for each that could not be set.
pub(super) fn set(sockets: &[SocketOptions]) -> Vec<String> {
    let mut failed: BTreeMap<String, Vec<(i32, i32, io::Error)>> = BTreeMap::new();
    for SocketOptions { pid, fd, options } in sockets {
        let socket = descriptors::open(*pid, *fd).and_then(|it| Ok(it.ok_or(io::ErrorKind::NotFound)?));
        for option in options {
            let row = table::find(option.level, option.name);
            let result = match (&socket, row) {
                (Ok(socket), Some(row)) => set_one(socket.as_fd(), row, &option.value),
                (Err(error), _) => Err(io::Error::new(error.kind(), error.to_string())),
                // A later version has saved it.
                (_, None) => Err(io::ErrorKind::Unsupported.into()),
            };
            if let Err(error) = result {
                let unknown = || format!("{} of the level {}", option.name, option.level);
                let name = row.map_or_else(unknown, |row| row.name.to_owned());
                failed.entry(name).or_default().push((*pid, *fd, error));
            }
        }
    }
    let warning = |(name, all): (String, Vec<(i32, i32, io::Error)>)| {
        let (pid, fd, error) = all.first()?;
        let more = all.len() - 1;
        let more = if more > 0 { format!(", and of {more} more sockets") } else { String::new() };
        Some(format!(
            "cannot set the socket option {name} of descriptor {fd} of process {pid} again{more}: {error}"
        ))
    };
    failed.into_iter().filter_map(warning).collect()
}

fn set_one(socket: BorrowedFd, row: &Row, value: &[u8]) -> io::Result<()> {
    let number = match row.value {
        Value::Interface => interface_number(value)?,
        Value::InterfaceInNetworkOrder => interface_number(value)?.to_be(),
        _ => return put(socket, row, value),
    };
    put(socket, row, &number.to_ne_bytes())
}

fn value(socket: BorrowedFd, row: &Row) -> io::Result<Vec<u8>> {
    get(socket, row.level, row.number, row.value.most_bytes())
}

fn int(value: &[u8]) -> io::Result<c_int> {
    Ok(c_int::from_ne_bytes(value.try_into().map_err(io::Error::other)?))
}

fn interface_name(number: c_int) -> Option<Vec<u8>> {
    let mut name = [0_u8; libc::IF_NAMESIZE];
    // SAFETY: the call writes at most IF_NAMESIZE bytes to `name`, a terminating zero included.
    let found = unsafe { libc::if_indextoname(number.cast_unsigned(), name.as_mut_ptr().cast()) };
    if found.is_null() {
        return None;
    }
    Some(name.split(|&byte| byte == 0).next()?.to_vec())
}

fn interface_number(name: &[u8]) -> io::Result<c_int> {
    let name = CString::new(name)?;
    // SAFETY: the call reads a string that ends with a zero and lives until after the call.
    let number = unsafe { libc::if_nametoindex(name.as_ptr()) };
    if number == 0 { Err(io::Error::last_os_error()) } else { Ok(number.cast_signed()) }
}

fn get(socket: BorrowedFd, level: c_int, number: c_int, most: usize) -> io::Result<Vec<u8>> {
    let mut value = [0_u8; MOST_BYTES];
    let mut bytes = libc::socklen_t::try_from(most.min(MOST_BYTES)).map_err(io::Error::other)?;
    let to = value.as_mut_ptr().cast();
    // SAFETY: the kernel writes at most `bytes` bytes to `to`, which has room for them.
    let result = unsafe { libc::getsockopt(socket.as_raw_fd(), level, number, to, &raw mut bytes) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(value[..MOST_BYTES.min(bytes as usize)].to_vec())
}

fn put(socket: BorrowedFd, row: &Row, value: &[u8]) -> io::Result<()> {
    let bytes = libc::socklen_t::try_from(value.len()).map_err(io::Error::other)?;
    let from = value.as_ptr().cast();
    // SAFETY: the kernel reads the `bytes` bytes of `value`, which lives until after the call.
    let result = unsafe { libc::setsockopt(socket.as_raw_fd(), row.level, row.number, from, bytes) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketType, bind, listen, socket};
    use std::io::{Read, Write};
    use std::net::{Ipv4Addr, SocketAddrV4, TcpListener, TcpStream, UdpSocket};
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    const PID_UNKNOWN: i32 = i32::MAX;

    fn own(socket: &impl AsRawFd) -> OpenSockets {
        OpenSockets::from([(1, (std::process::id().cast_signed(), socket.as_raw_fd()))])
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    fn named(name: &str) -> &'static Row {
        TABLE.iter().find(|row| row.name == name).unwrap()
    }

    fn tcp() -> OwnedFd {
        socket(AddressFamily::INET, SocketType::STREAM, None).unwrap()
    }

    #[test]
    fn no_option_is_named_twice_and_all_fit() {
        for (at, row) in TABLE.iter().enumerate() {
            assert_eq!(TABLE.iter().position(|other| other.name == row.name), Some(at), "{}", row.name);
            assert!(std::ptr::eq(find(row), row) && row.value.most_bytes() <= MOST_BYTES, "{}", row.name);
        }
    }

    fn find(row: &Row) -> &'static Row {
        table::find(row.level, row.number).unwrap()
    }

    /// The program sets each of them, and is checkpointed and resumed.
    #[test]
    fn the_end_to_end_test_has_every_option() {
        let program = include_str!("../../../tests/programs/socket_options.py");
        for row in TABLE {
            let call = format!("(\"{}\", {}, ", row.name, row.number);
            assert!(program.contains(&call), "{call}…");
        }
    }

    #[test]
    fn what_differs_from_a_new_socket_is_set_again() {
        let old = tcp();
        assert_eq!(read(&own(&old), soon()), (Vec::new(), 0));
        let congestion = b"reno\0\0\0\0\0\0\0\0\0\0\0\0";
        let values: [(&str, &[u8]); 3] = [
            ("TCP_CONGESTION", congestion),
            ("TCP_USER_TIMEOUT", &30_000_i32.to_ne_bytes()),
            ("IP_RECVERR", &1_i32.to_ne_bytes()),
        ];
        for (name, value) in values {
            put(old.as_fd(), named(name), value).unwrap();
        }
        let (mut found, unread) = read(&own(&old), soon());
        assert_eq!((found.len(), unread), (1, 0));
        let new = tcp();
        found[0].fd = new.as_raw_fd();
        assert_eq!(set(&found), Vec::<String>::new());
        for (name, expected) in values {
            assert_eq!(value(new.as_fd(), named(name)).unwrap(), expected, "{name}");
        }
        assert_eq!(read(&own(&new), soon()), (found, 0));
    }

    #[test]
    fn plain_sockets_have_nothing_to_be_saved() {
        // Without IPv6, there is nothing to be looked at.
        let listeners = ["127.0.0.1:0", "[::1]:0"].map(TcpListener::bind);
        for listener in listeners.into_iter().flatten() {
            let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (mut server, _) = listener.accept().unwrap();
            client.write_all(b"x").unwrap();
            server.read_exact(&mut [0]).unwrap();
            server.write_all(b"x").unwrap();
            client.read_exact(&mut [0]).unwrap();
            for socket in [client.as_fd(), server.as_fd(), listener.as_fd()] {
                assert_eq!(read(&own(&socket), soon()), (Vec::new(), 0));
            }
        }
        let pair = UnixStream::pair().unwrap();
        assert_eq!(read(&own(&pair.0), soon()), (Vec::new(), 0));
        let udp = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        udp.connect(udp.local_addr().unwrap()).unwrap();
        udp.send(b"x").unwrap();
        assert_eq!(read(&own(&udp), soon()), (Vec::new(), 0));
    }

    #[test]
    fn some_options_are_saved_only_while_there_is_no_connection() {
        let listening = tcp();
        put(listening.as_fd(), named("TCP_MAXSEG"), &1000_i32.to_ne_bytes()).unwrap();
        bind(&listening, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0)).unwrap();
        listen(&listening, 1).unwrap();
        let listening = TcpListener::from(listening);
        let client = TcpStream::connect(listening.local_addr().unwrap()).unwrap();
        let number = named("TCP_MAXSEG").number;
        let has = |found: &[SocketOptions]| {
            found.iter().any(|one| one.options.iter().any(|option| option.name == number))
        };
        assert!(has(&read(&own(&listening), soon()).0));
        assert!(!has(&read(&own(&client), soon()).0));
    }

    #[test]
    fn an_interface_is_saved_by_its_name() {
        let row = named("IP_UNICAST_IF");
        let udp = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let loopback = interface_number(b"lo").unwrap();
        put(udp.as_fd(), row, &loopback.to_be_bytes()).unwrap();
        let (found, _) = read(&own(&udp), soon());
        assert_eq!(found[0].options[0].value, b"lo");
        put(udp.as_fd(), row, &[0; 4]).unwrap();
        assert_eq!(set(&found), Vec::<String>::new());
        assert_eq!(value(udp.as_fd(), row).unwrap(), loopback.to_be_bytes());
    }

    #[test]
    fn what_cannot_be_set_is_named_once_for_each_option() {
        let socket = tcp();
        let (pid, fd) = (std::process::id().cast_signed(), socket.as_raw_fd());
        let option = |name: &str, value: &[u8]| {
            let Row { level, number, .. } = named(name);
            SocketOption { level: *level, name: *number, value: value.to_vec() }
        };
        let wrong = SocketOptions { pid, fd, options: vec![option("TCP_CONGESTION", b"nonesuch")] };
        let gone =
            SocketOptions { pid: PID_UNKNOWN, fd, options: vec![option("SO_ZEROCOPY", &[1, 0, 0, 0])] };
        let later = SocketOption { level: 6, name: 5000, value: vec![1] };
        let later = SocketOptions { pid, fd, options: vec![later] };
        let warnings = set(&[wrong.clone(), wrong, gone, later]);
        assert_eq!(warnings.len(), 3, "{warnings:?}");
        assert!(warnings.iter().any(|one| one.contains("TCP_CONGESTION") && one.contains("1 more")));
        assert!(warnings.iter().any(|one| one.contains("SO_ZEROCOPY")));
        assert!(warnings.iter().any(|one| one.contains("5000 of the level 6")));
    }

    #[test]
    fn sockets_after_the_deadline_are_counted() {
        let socket = tcp();
        put(socket.as_fd(), named("TCP_USER_TIMEOUT"), &1000_i32.to_ne_bytes()).unwrap();
        assert_eq!(read(&own(&socket), Instant::now()), (Vec::new(), 1));
    }
}
