"""Has a lease on the file `late`, so that who opens it for writing waits, three seconds longer than it has to."""

import fcntl
import os
import signal
import time

HELD_S = 3

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGIO})
fd = os.open("late", os.O_RDONLY)
fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
print("held", flush=True)
signal.sigwait({signal.SIGIO})
time.sleep(HELD_S)
fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
print("released", flush=True)
