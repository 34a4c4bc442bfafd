"""3 MB of shared memory in an unlinked file of /dev/shm (as torch's DataLoader has), in two processes."""

import mmap
import os

from harness import await_go, check, child, equal, passed, reap, start, until, wait

SIZE, TICKS = 3 << 20, 1 << 16
start()
name = f"/dev/shm/unlinked-{os.getpid()}"
fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
os.ftruncate(fd, SIZE)
shared = mmap.mmap(fd, SIZE)
os.close(fd)
os.unlink(name)
pattern = os.urandom(SIZE - TICKS - 16)
shared[TICKS:-16] = pattern
ticks = 0


def tick():
    global ticks
    shared[ticks] = 1
    ticks += 1


def other_side():
    await_go()
    until(lambda: shared[-16:-10] == b"parent", "the parent's change")
    shared[-5:] = b"child"


pid = child(other_side)

wait(tick)

marks = shared[:TICKS].count(1)
check(marks == ticks, f"{marks} marks in shared memory, {ticks} made by this run of the job")
check(shared[TICKS:-16] == pattern, "the content has changed")
shared[-16:-10] = b"parent"
reap(pid)
equal(shared[-5:], b"child", "content after the child's write")
passed()
