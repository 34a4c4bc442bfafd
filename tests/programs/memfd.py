"""A memfd shared with a child: content, mapping, offset, name and seals kept, later changes seen by both."""

import errno
import fcntl
import mmap
import os

from harness import await_go, check, child, equal, passed, reap, start, until, wait

SIZE = 3 << 20
F_ADD_SEALS, F_GET_SEALS = 1033, 1034
F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_WRITE = 2, 4, 8
pattern = bytes(range(256)) * (SIZE // 256)

start()
fd = os.memfd_create("state", os.MFD_ALLOW_SEALING)
os.write(fd, pattern)
os.lseek(fd, 1000, os.SEEK_SET)
fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)
shared = mmap.mmap(fd, SIZE)
shared[5:10] = b"map'd"
sealed = os.memfd_create("sealed", os.MFD_ALLOW_SEALING)
os.write(sealed, b"cannot change")
fcntl.fcntl(sealed, F_ADD_SEALS, F_SEAL_WRITE)


def other_side():
    await_go()
    until(lambda: shared[0:6] == b"parent", "the parent's change")
    shared[SIZE - 5 : SIZE] = b"child"


pid = child(other_side)

wait()

equal(os.pread(fd, SIZE, 0), pattern[:5] + b"map'd" + pattern[10:], "content")
equal(os.read(fd, 4), pattern[1000:1004], "content at the offset")
check("/memfd:state" in os.readlink(f"/proc/self/fd/{fd}"), "the name is lost")
equal(fcntl.fcntl(fd, F_GET_SEALS), F_SEAL_SHRINK | F_SEAL_GROW, "seals")
os.pwrite(fd, b"parent", 0)
equal(shared[0:6], b"parent", "mapping after a write")
reap(pid)
equal(os.pread(fd, 5, SIZE - 5), b"child", "content after the child's write")
for change in (lambda: os.ftruncate(fd, 1), lambda: os.pwrite(sealed, b"x", 0)):
    try:
        change()
        check(False, "a seal is lost")
    except OSError as e:
        equal(e.errno, errno.EPERM, "error of a sealed change")
equal(os.pread(sealed, 100, 0), b"cannot change", "content of the sealed one")
passed()
