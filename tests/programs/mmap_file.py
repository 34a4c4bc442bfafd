"""A regular file mapped shared and private, with a private page changed: content and continued use."""

import mmap
import os

from harness import await_go, check, child, equal, passed, reap, start, until, wait

PAGE, SIZE = mmap.PAGESIZE, 64 * mmap.PAGESIZE
start()
with open("data", "wb") as f:
    f.write(b"f" * SIZE)
fd = os.open("data", os.O_RDWR)
shared = mmap.mmap(fd, SIZE)
private = mmap.mmap(fd, SIZE, flags=mmap.MAP_PRIVATE)
tail = mmap.mmap(fd, PAGE, offset=SIZE - PAGE, access=mmap.ACCESS_READ)
os.close(fd)
shared[0:6] = b"shared"
private[PAGE : PAGE + 7] = b"private"
large = mmap.mmap(-1, 8 << 20)
large.madvise(mmap.MADV_DONTFORK)
large[5 << 20] = 77


def other_side():
    await_go()
    until(lambda: shared[0:6] == b"parent", "the parent's change")
    private[0:5] = b"other"
    shared[-5:] = b"child"


pid = child(other_side)

wait()

equal(shared[0:6], b"shared", "shared content")
equal(private[PAGE : PAGE + 7], b"private", "private content")
equal(shared[PAGE : PAGE + 7], b"f" * 7, "file under the private change")
equal((large[0], large[5 << 20], large[6 << 20]), (0, 77, 0), "anonymous memory")
shared[0:6] = b"parent"
equal(private[0:6], b"parent", "unchanged private page sees the file")
reap(pid)
equal(tail[-5:], b"child", "read-only mapping after the child's write")
equal(private[0:6], b"parent", "private page after the child's private write")
with open("data", "rb") as f:
    data = f.read()
check(data == b"parent" + b"f" * (SIZE - 11) + b"child", "content of the file")
passed()
