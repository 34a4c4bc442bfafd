"""Options of sockets: every one that CRIU does not save, on each kind of socket that has it."""

import errno
import os
import socket
import struct
import sys

from harness import check, equal, passed, start, wait

SOCKET, IP, TCP, UDP, IPV6, NETLINK = 1, 0, 6, 17, 41, 270
LOOPBACK = socket.if_nametoindex("lo")
# Longer than the test.
LONG_S = 1000


def i32(value):
    return struct.pack("i", value)


# By level: name, number, value that is not the default.
SOCKET_OPTIONS = [
    ("SO_TIMESTAMPING", 37, i32(1 << 4)),
    ("SO_DEBUG", 1, i32(1)),
    ("SO_RXQ_OVFL", 40, i32(1)),
    ("SO_WIFI_STATUS", 41, i32(1)),
    ("SO_PEEK_OFF", 42, i32(0)),
    ("SO_NOFCS", 43, i32(1)),
    ("SO_SELECT_ERR_QUEUE", 45, i32(1)),
    ("SO_BUSY_POLL", 46, i32(7)),
    ("SO_MAX_PACING_RATE", 47, struct.pack("Q", 1 << 40)),
    ("SO_ZEROCOPY", 60, i32(1)),
    ("SO_TXTIME", 61, struct.pack("iI", 1, 1)),
    ("SO_PREFER_BUSY_POLL", 69, i32(1)),
    ("SO_TXREHASH", 74, i32(0)),
    ("SO_RCVMARK", 75, i32(1)),
    ("SO_PASSPIDFD", 76, i32(1)),
    ("SO_RCVPRIORITY", 82, i32(1)),
    ("SO_PASSRIGHTS", 83, i32(0)),
]
# Each of them turns off the others.
TIMES = [
    ("SO_TIMESTAMP", 29, i32(1)),
    ("SO_TIMESTAMPNS", 35, i32(1)),
    ("SO_TIMESTAMP_NEW", 63, i32(1)),
    ("SO_TIMESTAMPNS_NEW", 64, i32(1)),
]
# Only for sockets that are not connected.
SOCKET_UNCONNECTED = [("SO_INCOMING_CPU", 49, i32(0))]
TCP_UNCONNECTED = [
    ("TCP_MAXSEG", 2, i32(1000)),
    ("TCP_WINDOW_CLAMP", 10, i32(100_000)),
    ("TCP_FASTOPEN", 23, i32(5)),
    ("TCP_FASTOPEN_NO_COOKIE", 34, i32(1)),
]
TCP_CLOSED = [("TCP_FASTOPEN_CONNECT", 30, i32(1))]
TCP_OPTIONS = [
    ("TCP_SYNCNT", 7, i32(4)),
    ("TCP_LINGER2", 8, i32(7)),
    ("TCP_DEFER_ACCEPT", 9, i32(7)),
    ("TCP_CONGESTION", 13, b"reno"),
    ("TCP_THIN_LINEAR_TIMEOUTS", 16, i32(1)),
    ("TCP_USER_TIMEOUT", 18, i32(LONG_S * 1000)),
    ("TCP_NOTSENT_LOWAT", 25, i32(12345)),
    ("TCP_SAVE_SYN", 27, i32(1)),
    ("TCP_INQ", 36, i32(1)),
    ("TCP_TX_DELAY", 37, i32(10)),
    ("TCP_RTO_MAX_MS", 44, i32(5000)),
    ("TCP_RTO_MIN_US", 45, i32(100_000)),
    ("TCP_DELACK_MAX_US", 46, i32(20_000)),
]
UDP_OPTIONS = [
    ("UDP_ENCAP", 100, i32(2)),
    ("UDP_NO_CHECK6_TX", 101, i32(1)),
    ("UDP_NO_CHECK6_RX", 102, i32(1)),
    ("UDP_SEGMENT", 103, i32(500)),
    ("UDP_GRO", 104, i32(1)),
]
IP_OPTIONS = [
    ("IP_RECVOPTS", 6, i32(1)),
    ("IP_RETOPTS", 7, i32(1)),
    ("IP_MTU_DISCOVER", 10, i32(2)),
    ("IP_RECVERR", 11, i32(1)),
    ("IP_RECVTTL", 12, i32(1)),
    ("IP_RECVTOS", 13, i32(1)),
    ("IP_PASSSEC", 18, i32(1)),
    ("IP_TRANSPARENT", 19, i32(1)),
    ("IP_ORIGDSTADDR", 20, i32(1)),
    ("IP_MINTTL", 21, i32(3)),
    ("IP_CHECKSUM", 23, i32(1)),
    ("IP_BIND_ADDRESS_NO_PORT", 24, i32(1)),
    ("IP_RECVFRAGSIZE", 25, i32(1)),
    ("IP_RECVERR_RFC4884", 26, i32(1)),
    ("IP_MULTICAST_IF", 32, socket.inet_aton("127.0.0.1")),
    ("IP_MULTICAST_TTL", 33, i32(9)),
    ("IP_MULTICAST_LOOP", 34, i32(0)),
    ("IP_MULTICAST_ALL", 49, i32(0)),
    ("IP_UNICAST_IF", 50, struct.pack(">i", LOOPBACK)),
    ("IP_LOCAL_PORT_RANGE", 51, struct.pack("HH", 40000, 40100)),
]
IPV6_OPTIONS = [
    ("IPV6_2292PKTINFO", 2, i32(1)),
    ("IPV6_2292HOPOPTS", 3, i32(1)),
    ("IPV6_2292DSTOPTS", 4, i32(1)),
    ("IPV6_2292RTHDR", 5, i32(1)),
    ("IPV6_2292HOPLIMIT", 8, i32(1)),
    ("IPV6_FLOWINFO", 11, i32(1)),
    ("IPV6_UNICAST_HOPS", 16, i32(11)),
    ("IPV6_MULTICAST_IF", 17, i32(LOOPBACK)),
    ("IPV6_MULTICAST_HOPS", 18, i32(9)),
    ("IPV6_MULTICAST_LOOP", 19, i32(0)),
    ("IPV6_MTU_DISCOVER", 23, i32(2)),
    ("IPV6_RECVERR", 25, i32(1)),
    ("IPV6_MULTICAST_ALL", 29, i32(0)),
    ("IPV6_RECVERR_RFC4884", 31, i32(1)),
    ("IPV6_FLOWINFO_SEND", 33, i32(1)),
    ("IPV6_RECVPKTINFO", 49, i32(1)),
    ("IPV6_RECVHOPLIMIT", 51, i32(1)),
    ("IPV6_RECVHOPOPTS", 53, i32(1)),
    ("IPV6_RECVRTHDR", 56, i32(1)),
    ("IPV6_RECVDSTOPTS", 58, i32(1)),
    ("IPV6_RECVPATHMTU", 60, i32(1)),
    ("IPV6_DONTFRAG", 62, i32(1)),
    ("IPV6_RECVTCLASS", 66, i32(1)),
    ("IPV6_TCLASS", 67, i32(0x20)),
    ("IPV6_AUTOFLOWLABEL", 70, i32(0)),
    ("IPV6_ADDR_PREFERENCES", 72, i32(2)),
    ("IPV6_MINHOPCOUNT", 73, i32(3)),
    ("IPV6_ORIGDSTADDR", 74, i32(1)),
    ("IPV6_TRANSPARENT", 75, i32(1)),
    ("IPV6_UNICAST_IF", 76, struct.pack(">i", LOOPBACK)),
    ("IPV6_RECVFRAGSIZE", 77, i32(1)),
]
NETLINK_OPTIONS = [
    ("NETLINK_PKTINFO", 3, i32(1)),
    ("NETLINK_BROADCAST_ERROR", 4, i32(1)),
    ("NETLINK_NO_ENOBUFS", 5, i32(1)),
    ("NETLINK_LISTEN_ALL_NSID", 8, i32(1)),
    ("NETLINK_CAP_ACK", 10, i32(1)),
    ("NETLINK_EXT_ACK", 11, i32(1)),
    ("NETLINK_GET_STRICT_CHK", 12, i32(1)),
]
# Nothing can be undone after it.
LAST = [("SO_LOCK_FILTER", 44, i32(1))]
# 64-bit time stamps: with them SO_TIMESTAMPING has to be the second kind.
NEW_TIMES = [("SO_TIMESTAMPING_NEW", 65, i32(1 << 4)), TIMES[2]]

set_anywhere, known = set(), set()


def value(sock, level, number):
    return sock.getsockopt(level, number, 16)


class Case:
    """A socket with some options; `expected` has what the kernel returned for them."""

    def __init__(self, what, sock, *levels):
        self.what, self.sock, self.expected = what, sock, {}
        for level, options in levels:
            for name, number, wanted in options:
                self.put(level, name, number, wanted)
        # Some set others, too.
        for key in self.expected:
            self.expected[key] = value(sock, *key[1:])

    def put(self, level, name, number, wanted):
        known.add(name)
        try:
            before = value(self.sock, level, number)
            self.sock.setsockopt(level, number, wanted)
        except OSError as e:
            allowed = (errno.ENOPROTOOPT, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM, errno.ENOTCONN)
            check(e.errno in allowed, f"{self.what} {name}: {e}")
            return
        if value(self.sock, level, number) != before:
            set_anywhere.add(name)
            self.expected[name, level, number] = None

    def check(self):
        for (name, *key), expected in self.expected.items():
            equal(value(self.sock, *key), expected, f"{name} of {self.what}")


def options_of(family, protocol):
    levels = [(SOCKET, SOCKET_OPTIONS)]
    if family in (socket.AF_INET, socket.AF_INET6):
        levels += [(IP, IP_OPTIONS)]
        levels += {socket.IPPROTO_TCP: [(TCP, TCP_OPTIONS)], socket.IPPROTO_UDP: [(UDP, UDP_OPTIONS)]}[protocol]
    if family == socket.AF_INET6:
        levels += [(IPV6, IPV6_OPTIONS)]
    if family == socket.AF_NETLINK:
        levels += [(NETLINK, NETLINK_OPTIONS)]
    return levels


def listener(family, address):
    sock = socket.socket(family)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((address, 0))
    sock.listen(5)
    return sock


def cases():
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        tcp, udp = options_of(family, socket.IPPROTO_TCP), options_of(family, socket.IPPROTO_UDP)
        unconnected = [(SOCKET, SOCKET_UNCONNECTED), (TCP, TCP_UNCONNECTED)]
        try:
            plain = listener(family, address)
        except OSError as e:
            print(f"{address}: {e}", file=sys.stderr)
            continue
        client = socket.create_connection(plain.getsockname()[:2])
        server = plain.accept()[0]
        # What options change in packets may not end the connection.
        yield Case(f"the client {address}", client, *tcp, (SOCKET, TIMES[:1]))
        yield Case(f"the server {address}", server, (TCP, TCP_OPTIONS[3:6]), (SOCKET, TIMES[1:2]))
        yield Case(f"the listener {address}", plain, *tcp, *unconnected, (SOCKET, TIMES[:1]))
        yield Case(f"a closed socket {address}", socket.socket(family), *tcp, *unconnected, (TCP, TCP_CLOSED))
        for number in range(len(TIMES)):
            sock = socket.socket(family, socket.SOCK_DGRAM)
            yield Case(f"UDP {address} {number}", sock, *udp, (SOCKET, SOCKET_UNCONNECTED), (SOCKET, [TIMES[number]]))
        sock = socket.socket(family, socket.SOCK_DGRAM)
        yield Case(f"UDP {address} with new times", sock, (SOCKET, NEW_TIMES), (SOCKET, LAST))
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
        pair = socket.socketpair(socket.AF_UNIX, kind)
        for number, sock in enumerate(pair):
            yield Case(f"unix {kind}", sock, *options_of(socket.AF_UNIX, 0), (SOCKET, TIMES[number:number + 1]))
    route = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
    yield Case("netlink", route, *options_of(socket.AF_NETLINK, 0))


start()
all_cases = list(cases())
echo, echoed = (case.sock for case in all_cases[:2])
if os.geteuid() == 0:
    # A kernel may lack some, a job of root has the rights for all.
    few = known - set_anywhere
    print(f"not set: {sorted(few)}", file=sys.stderr)
    check(len(few) < 12, f"too few options can be set: not {sorted(few)}")

wait()

for case in all_cases:
    case.check()
echo.sendall(b"hello")
equal(echoed.recv(5), b"hello", "data after the resume")
passed()
