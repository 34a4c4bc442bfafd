"""A read that only an alarm ends, again and again: the handler was set without SA_RESTART, so each read returns EINTR."""

import ctypes
import errno
import os
import signal

from harness import equal, passed, start, wait

ALARM_S = 0.02

libc = ctypes.CDLL(None, use_errno=True)


def read_until_alarm():
    signal.setitimer(signal.ITIMER_REAL, ALARM_S)
    equal(libc.read(reader, ctypes.create_string_buffer(1), 1), -1, "result of the read")
    equal(ctypes.get_errno(), errno.EINTR, "errno of the read")


start()
signal.signal(signal.SIGALRM, lambda *_: None)
signal.siginterrupt(signal.SIGALRM, True)
reader, writer = os.pipe()
wait(read_until_alarm)
passed()
