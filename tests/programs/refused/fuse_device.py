"""An open /dev/fuse: a file system's server that has not mounted yet."""

import errno
import os

import _path  # noqa: F401
from harness import equal, passed, start, unavailable, wait

start()
try:
    fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
except OSError as e:
    unavailable(e)


def answer():
    """The error of a read: EPERM as long as nothing is mounted."""
    try:
        return os.read(fd, 1 << 17)
    except OSError as e:
        return e.errno


equal(answer(), errno.EPERM, "read before")

wait()

equal(answer(), errno.EPERM, "read afterwards")
passed()
