"""A signalfd with pending signals and their values: read afterwards, new signals arrive too."""

import os
import signal
import struct

from harness import equal, passed, start, wait
from linux import call, sigset

SIGNALS = (signal.SIGUSR1, signal.SIGRTMIN)


def read():
    """(signal, value) of the next signal in the descriptor."""
    raw = os.read(fd, 128)
    return struct.unpack_from("I", raw)[0], struct.unpack_from("i", raw, 44)[0]


start()
signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
fd = call("signalfd", -1, sigset(*SIGNALS), os.O_NONBLOCK)
os.kill(os.getpid(), signal.SIGUSR1)
for value in (11, 22):
    call("sigqueue", os.getpid(), int(signal.SIGRTMIN), value)

wait()

equal(read(), (signal.SIGUSR1, 0), "pending signal")
equal(read(), (signal.SIGRTMIN, 11), "first queued signal")
equal(read(), (signal.SIGRTMIN, 22), "second queued signal")
try:
    equal(read(), None, "a signal too many")
except BlockingIOError:
    pass
os.kill(os.getpid(), signal.SIGUSR1)
equal(read(), (signal.SIGUSR1, 0), "signal sent afterwards")
passed()
