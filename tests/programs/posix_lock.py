"""fcntl() record locks: kinds and ranges are held against a child; release works."""

import fcntl
import os

from harness import check, child, equal, passed, process_state, reap, start, until, wait

start()
fd = os.open("records", os.O_RDWR | os.O_CREAT)
os.write(fd, b"x" * 100)
fcntl.lockf(fd, fcntl.LOCK_EX, 10, 0)
fcntl.lockf(fd, fcntl.LOCK_SH, 20, 50)


def is_free(how, length, at):
    try:
        fcntl.lockf(fd, how | fcntl.LOCK_NB, length, at)
        fcntl.lockf(fd, fcntl.LOCK_UN, length, at)
        return True
    except BlockingIOError:
        return False


def expect(*answered):
    """Record locks belong to a process: another one has to ask."""

    def run():
        for how, length, at, free in answered:
            equal(is_free(how, length, at), free, f"lock {how} of {length} bytes at {at} is free")

    reap(child(run))


waiting = child(lambda: fcntl.lockf(fd, fcntl.LOCK_EX, 1, 9))
until(lambda: process_state(waiting) == "S", "the child sleeps")

wait()

expect(
    (fcntl.LOCK_SH, 1, 5, False),
    (fcntl.LOCK_EX, 1, 60, False),
    (fcntl.LOCK_SH, 1, 60, True),
    (fcntl.LOCK_EX, 20, 20, True),
)
equal(process_state(waiting), "S", "state of the waiting child")
fcntl.lockf(fd, fcntl.LOCK_UN, 10, 0)
reap(waiting)
expect((fcntl.LOCK_EX, 10, 0, True), (fcntl.LOCK_EX, 1, 60, False))
check(os.pread(fd, 1, 0) == b"x", "the file is lost")
passed()
