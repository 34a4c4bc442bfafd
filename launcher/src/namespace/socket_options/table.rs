//! The options that are saved. The numbers are those of Linux's headers: asm-generic/socket.h, linux/tcp.h, linux/udp.h,
//! linux/in.h, linux/in6.h, linux/netlink.h.

use std::ffi::c_int;

/// The type of an option's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Value {
    /// An integer.
    Int,
    /// An integer that is saved unless the socket is connected: the kernel then changes it by itself, or does not let it be
    /// set.
    Unconnected,
    /// At most so many bytes.
    Bytes(usize),
    /// The number of a network interface, which is saved by its name: another one may have the number later.
    Interface,
    /// The same, in network byte order.
    InterfaceInNetworkOrder,
}

impl Value {
    /// The most that the kernel returns, bytes.
    pub(super) const fn most_bytes(self) -> usize {
        match self {
            Self::Bytes(most) => most,
            _ => size_of::<c_int>(),
        }
    }
}

/// An option.
#[derive(Debug)]
pub(super) struct Row {
    pub(super) level: c_int,
    pub(super) number: c_int,
    pub(super) name: &'static str,
    pub(super) value: Value,
}

pub(super) const SO_PEEK_OFF: c_int = 42;

const SOCKET: c_int = libc::SOL_SOCKET;
const IP: c_int = libc::SOL_IP;
const TCP: c_int = libc::SOL_TCP;
const UDP: c_int = libc::SOL_UDP;
const IPV6: c_int = libc::SOL_IPV6;
const NETLINK: c_int = libc::SOL_NETLINK;

const fn row(level: c_int, number: c_int, name: &'static str, value: Value) -> Row {
    Row { level, number, name, value }
}

const fn int(level: c_int, number: c_int, name: &'static str) -> Row {
    row(level, number, name, Value::Int)
}

/// The row of an option.
pub(super) fn find(level: c_int, number: c_int) -> Option<&'static Row> {
    TABLE.iter().find(|row| row.level == level && row.number == number)
}

/// In the order in which they are set: SO_TIMESTAMPING of either kind decides whether time stamps are 64-bit, and those
/// that follow have to agree with it. After SO_LOCK_FILTER nothing else is set.
pub(super) static TABLE: &[Row] = &[
    row(SOCKET, 37, "SO_TIMESTAMPING", Value::Bytes(8)),
    row(SOCKET, 65, "SO_TIMESTAMPING_NEW", Value::Bytes(8)),
    int(SOCKET, 29, "SO_TIMESTAMP"),
    int(SOCKET, 35, "SO_TIMESTAMPNS"),
    int(SOCKET, 63, "SO_TIMESTAMP_NEW"),
    int(SOCKET, 64, "SO_TIMESTAMPNS_NEW"),
    int(SOCKET, 1, "SO_DEBUG"),
    int(SOCKET, 40, "SO_RXQ_OVFL"),
    int(SOCKET, 41, "SO_WIFI_STATUS"),
    int(SOCKET, SO_PEEK_OFF, "SO_PEEK_OFF"),
    int(SOCKET, 43, "SO_NOFCS"),
    int(SOCKET, 45, "SO_SELECT_ERR_QUEUE"),
    int(SOCKET, 46, "SO_BUSY_POLL"),
    row(SOCKET, 47, "SO_MAX_PACING_RATE", Value::Bytes(8)),
    row(SOCKET, 49, "SO_INCOMING_CPU", Value::Unconnected),
    int(SOCKET, 60, "SO_ZEROCOPY"),
    row(SOCKET, 61, "SO_TXTIME", Value::Bytes(8)),
    int(SOCKET, 69, "SO_PREFER_BUSY_POLL"),
    int(SOCKET, 74, "SO_TXREHASH"),
    int(SOCKET, 75, "SO_RCVMARK"),
    int(SOCKET, 76, "SO_PASSPIDFD"),
    int(SOCKET, 82, "SO_RCVPRIORITY"),
    int(SOCKET, 83, "SO_PASSRIGHTS"),
    row(TCP, 2, "TCP_MAXSEG", Value::Unconnected),
    int(TCP, 7, "TCP_SYNCNT"),
    int(TCP, 8, "TCP_LINGER2"),
    int(TCP, 9, "TCP_DEFER_ACCEPT"),
    row(TCP, 10, "TCP_WINDOW_CLAMP", Value::Unconnected),
    row(TCP, 13, "TCP_CONGESTION", Value::Bytes(16)),
    int(TCP, 16, "TCP_THIN_LINEAR_TIMEOUTS"),
    int(TCP, 18, "TCP_USER_TIMEOUT"),
    row(TCP, 23, "TCP_FASTOPEN", Value::Unconnected),
    int(TCP, 25, "TCP_NOTSENT_LOWAT"),
    int(TCP, 27, "TCP_SAVE_SYN"),
    row(TCP, 30, "TCP_FASTOPEN_CONNECT", Value::Unconnected),
    row(TCP, 34, "TCP_FASTOPEN_NO_COOKIE", Value::Unconnected),
    int(TCP, 36, "TCP_INQ"),
    int(TCP, 37, "TCP_TX_DELAY"),
    int(TCP, 44, "TCP_RTO_MAX_MS"),
    int(TCP, 45, "TCP_RTO_MIN_US"),
    int(TCP, 46, "TCP_DELACK_MAX_US"),
    int(UDP, 100, "UDP_ENCAP"),
    int(UDP, 101, "UDP_NO_CHECK6_TX"),
    int(UDP, 102, "UDP_NO_CHECK6_RX"),
    int(UDP, 103, "UDP_SEGMENT"),
    int(UDP, 104, "UDP_GRO"),
    int(IP, 6, "IP_RECVOPTS"),
    int(IP, 7, "IP_RETOPTS"),
    int(IP, 10, "IP_MTU_DISCOVER"),
    int(IP, 11, "IP_RECVERR"),
    int(IP, 12, "IP_RECVTTL"),
    int(IP, 13, "IP_RECVTOS"),
    int(IP, 18, "IP_PASSSEC"),
    int(IP, 19, "IP_TRANSPARENT"),
    int(IP, 20, "IP_ORIGDSTADDR"),
    int(IP, 21, "IP_MINTTL"),
    int(IP, 23, "IP_CHECKSUM"),
    int(IP, 24, "IP_BIND_ADDRESS_NO_PORT"),
    int(IP, 25, "IP_RECVFRAGSIZE"),
    int(IP, 26, "IP_RECVERR_RFC4884"),
    int(IP, 32, "IP_MULTICAST_IF"),
    int(IP, 33, "IP_MULTICAST_TTL"),
    int(IP, 34, "IP_MULTICAST_LOOP"),
    int(IP, 49, "IP_MULTICAST_ALL"),
    row(IP, 50, "IP_UNICAST_IF", Value::InterfaceInNetworkOrder),
    int(IP, 51, "IP_LOCAL_PORT_RANGE"),
    int(IPV6, 2, "IPV6_2292PKTINFO"),
    int(IPV6, 3, "IPV6_2292HOPOPTS"),
    int(IPV6, 4, "IPV6_2292DSTOPTS"),
    int(IPV6, 5, "IPV6_2292RTHDR"),
    int(IPV6, 8, "IPV6_2292HOPLIMIT"),
    int(IPV6, 11, "IPV6_FLOWINFO"),
    int(IPV6, 16, "IPV6_UNICAST_HOPS"),
    row(IPV6, 17, "IPV6_MULTICAST_IF", Value::Interface),
    int(IPV6, 18, "IPV6_MULTICAST_HOPS"),
    int(IPV6, 19, "IPV6_MULTICAST_LOOP"),
    int(IPV6, 23, "IPV6_MTU_DISCOVER"),
    int(IPV6, 25, "IPV6_RECVERR"),
    int(IPV6, 29, "IPV6_MULTICAST_ALL"),
    int(IPV6, 31, "IPV6_RECVERR_RFC4884"),
    int(IPV6, 33, "IPV6_FLOWINFO_SEND"),
    int(IPV6, 49, "IPV6_RECVPKTINFO"),
    int(IPV6, 51, "IPV6_RECVHOPLIMIT"),
    int(IPV6, 53, "IPV6_RECVHOPOPTS"),
    int(IPV6, 56, "IPV6_RECVRTHDR"),
    int(IPV6, 58, "IPV6_RECVDSTOPTS"),
    int(IPV6, 60, "IPV6_RECVPATHMTU"),
    int(IPV6, 62, "IPV6_DONTFRAG"),
    int(IPV6, 66, "IPV6_RECVTCLASS"),
    int(IPV6, 67, "IPV6_TCLASS"),
    int(IPV6, 70, "IPV6_AUTOFLOWLABEL"),
    int(IPV6, 72, "IPV6_ADDR_PREFERENCES"),
    int(IPV6, 73, "IPV6_MINHOPCOUNT"),
    int(IPV6, 74, "IPV6_ORIGDSTADDR"),
    int(IPV6, 75, "IPV6_TRANSPARENT"),
    row(IPV6, 76, "IPV6_UNICAST_IF", Value::InterfaceInNetworkOrder),
    int(IPV6, 77, "IPV6_RECVFRAGSIZE"),
    int(NETLINK, 3, "NETLINK_PKTINFO"),
    int(NETLINK, 4, "NETLINK_BROADCAST_ERROR"),
    int(NETLINK, 5, "NETLINK_NO_ENOBUFS"),
    int(NETLINK, 8, "NETLINK_LISTEN_ALL_NSID"),
    int(NETLINK, 10, "NETLINK_CAP_ACK"),
    int(NETLINK, 11, "NETLINK_EXT_ACK"),
    int(NETLINK, 12, "NETLINK_GET_STRICT_CHK"),
    int(SOCKET, 44, "SO_LOCK_FILTER"),
];
