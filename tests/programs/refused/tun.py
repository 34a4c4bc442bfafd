"""A network interface of its own (/dev/net/tun) that takes packets."""

import fcntl
import os
import struct

import _path  # noqa: F401
from harness import equal, passed, start, unavailable, wait

TUNSETIFF, TUNGETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x800454D2, 1, 0x1000
start()
try:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    request = fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", b"ckpt%d", IFF_TUN | IFF_NO_PI))
except OSError as e:
    unavailable(e)
name = request[:16].rstrip(b"\0")

wait()

equal(fcntl.ioctl(fd, TUNGETIFF, bytes(40))[:16].rstrip(b"\0"), name, "name of the interface")
passed()
