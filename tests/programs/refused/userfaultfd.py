"""A userfaultfd with a registered range: a thread's page fault is answered."""

import ctypes
import fcntl
import mmap
import os
import struct
import threading

import _path  # noqa: F401
from harness import equal, passed, start, unavailable, wait
from linux import call

SYS_USERFAULTFD, UFFD_USER_MODE_ONLY = 323, 1
UFFDIO_API, UFFDIO_REGISTER, UFFDIO_COPY = 0xC018AA3F, 0xC020AA00, 0xC028AA03
PAGE = mmap.PAGESIZE

start()
try:
    fd = call("syscall", SYS_USERFAULTFD, os.O_CLOEXEC | UFFD_USER_MODE_ONLY)
except OSError as e:
    unavailable(e)
fcntl.ioctl(fd, UFFDIO_API, struct.pack("QQQ", 0xAA, 0, 0))
memory = mmap.mmap(-1, PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
fcntl.ioctl(fd, UFFDIO_REGISTER, struct.pack("QQQQ", address, PAGE, 1, 0))

wait()


def answer():
    """Fills the page when the main thread's fault is told."""
    os.read(fd, 32)
    fcntl.ioctl(fd, UFFDIO_COPY, struct.pack("QQQQq", address, page, PAGE, 0, 0))


source = ctypes.create_string_buffer(b"filled".ljust(2 * PAGE, b"\0"))
page = ctypes.addressof(source) + -ctypes.addressof(source) % PAGE
ctypes.memmove(page, b"filled", 6)
thread = threading.Thread(target=answer)
thread.start()
read = ctypes.create_string_buffer(6)
call("memcpy", read, ctypes.c_void_p(address), 6)  # faults, without Python's lock held
thread.join(20)
equal(read.raw, b"filled", "content of the page")
passed()
