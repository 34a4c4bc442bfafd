"""Open-file-description locks: kinds and ranges are held against another description; release works."""

import fcntl
import os
import struct

from harness import check, equal, passed, start, wait

F_OFD_GETLK, F_OFD_SETLK = 36, 37
start()


def lock(fd, kind, at, length):
    fcntl.fcntl(fd, F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, at, length, 0))


def is_free(kind, at):
    try:
        lock(other, kind, at, 1)
        lock(other, fcntl.F_UNLCK, at, 1)
        return True
    except BlockingIOError:
        return False


fd = os.open("records", os.O_RDWR | os.O_CREAT)
lock(fd, fcntl.F_WRLCK, 0, 10)
lock(fd, fcntl.F_RDLCK, 50, 20)

wait()

other = os.open("records", os.O_RDWR)
check(not is_free(fcntl.F_RDLCK, 5), "the write lock is lost")
check(not is_free(fcntl.F_WRLCK, 60), "the read lock is lost")
check(is_free(fcntl.F_RDLCK, 60), "the read lock has become a write lock")
check(is_free(fcntl.F_WRLCK, 30), "a range that was free is locked")
query = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
kind, _, at, length, owner = struct.unpack("hhqqi4x", fcntl.fcntl(other, F_OFD_GETLK, query))
equal((kind, at, length, owner), (fcntl.F_WRLCK, 0, 10, -1), "the lock as another description sees it")
lock(fd, fcntl.F_UNLCK, 0, 10)
check(is_free(fcntl.F_WRLCK, 5), "the write lock stays after its release")
passed()
