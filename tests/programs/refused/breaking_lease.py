"""A lease that another process is breaking: its holder has got the signal, and has not given the lease up yet."""

import fcntl
import os
import signal

import _path  # noqa: F401
from harness import check, equal, passed, start, wait

start()
signals = []
signal.signal(signal.SIGIO, lambda *_: signals.append(1))
fd = os.open("leased", os.O_RDWR | os.O_CREAT, 0o600)
fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
try:
    os.open("leased", os.O_RDONLY | os.O_NONBLOCK)
    check(False, "the lease does not hold")
except BlockingIOError:
    pass
equal(signals, [1], "the signal")

wait()

equal(signals, [1], "no second signal")
equal(fcntl.fcntl(fd, fcntl.F_GETLEASE), fcntl.F_RDLCK, "the lease that is left")
passed()
