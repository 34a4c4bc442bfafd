"""Data in flight in a named pipe between parent and child; the name and both ends work afterwards."""

import os
import stat

from harness import await_go, check, child, equal, passed, reap, read_exactly, start, wait

start()
os.mkfifo("fifo", 0o640)


def write():
    fd = os.open("fifo", os.O_WRONLY)
    os.write(fd, b"queued " * 100)
    await_go()
    os.write(fd, b"later")
    os.close(fd)


pid = child(write)
fd = os.open("fifo", os.O_RDONLY)
equal(read_exactly(fd, 7), b"queued ", "first word")

wait()

equal(read_exactly(fd, 7 * 99), b"queued " * 99, "data queued in the fifo")
equal(read_exactly(fd, 5), b"later", "data written afterwards")
equal(os.read(fd, 1), b"", "end of the fifo")
reap(pid)
check(stat.S_ISFIFO(os.stat("fifo").st_mode), "the fifo has lost its name")
other = os.open("fifo", os.O_RDWR)
os.write(other, b"by name")
equal(os.read(fd, 100), b"by name", "data from a new opener")
passed()
