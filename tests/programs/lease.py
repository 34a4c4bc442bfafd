"""F_SETLEASE: a checkpoint breaks no lease; both kinds are held afterwards, and an open by another process breaks them."""

import fcntl
import os
import signal

from harness import check, child, equal, passed, reap, start, until, wait

start()

broken = []
signal.signal(signal.SIGIO, lambda *_: broken.append("a lease"))


def lease(name, how, flags):
    fd = os.open(name, flags | os.O_CREAT)
    if flags & os.O_RDWR:
        os.write(fd, b"content")
    fcntl.fcntl(fd, fcntl.F_SETLEASE, how)
    return fd


exclusive = lease("exclusive", fcntl.F_WRLCK, os.O_RDWR)
shared = lease("shared", fcntl.F_RDLCK, os.O_RDONLY)

wait()

equal(broken, [], "leases broken by the checkpoint")
equal(fcntl.fcntl(exclusive, fcntl.F_GETLEASE), fcntl.F_WRLCK, "the lease for writing")
equal(fcntl.fcntl(shared, fcntl.F_GETLEASE), fcntl.F_RDLCK, "the lease for reading")


def break_it(name, flags):
    try:
        os.close(os.open(name, flags | os.O_NONBLOCK))
    except BlockingIOError:
        return
    check(False, f"{name} is open, and its lease is not broken")


for number, (name, fd, flags) in enumerate((("exclusive", exclusive, os.O_RDONLY), ("shared", shared, os.O_WRONLY)), 1):
    pid = child(lambda: break_it(name, flags))
    reap(pid)
    until(lambda: len(broken) == number, f"the signal of {name}")
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
equal(os.pread(exclusive, 100, 0), b"content", "the content")
passed()
