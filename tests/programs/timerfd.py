"""Timer descriptors: remaining time, interval and an uncollected expiration kept; they fire afterwards."""

import ctypes
import os
import select
import struct
import time

from harness import check, equal, passed, start, wait
from linux import call, from_timerspec, timerspec

TFD_TIMER_ABSTIME = 1


def timer(clock, first_s, interval_s=0.0, flags=0):
    fd = call("timerfd_create", clock, os.O_NONBLOCK)
    call("timerfd_settime", fd, flags, timerspec(first_s, interval_s), None)
    return fd


def left(fd):
    raw = ctypes.create_string_buffer(32)
    call("timerfd_gettime", fd, raw)
    return from_timerspec(raw.raw)


def expirations(fd):
    return struct.unpack("Q", os.read(fd, 8))[0]


start()
pending = timer(time.CLOCK_MONOTONIC, 0.01)
far = timer(time.CLOCK_MONOTONIC, 5000, 7)
soon = timer(time.CLOCK_BOOTTIME, 2, 0.05)
absolute = timer(time.CLOCK_REALTIME, time.time() + 5000, 0, TFD_TIMER_ABSTIME)
check(select.select([pending], [], [], 10)[0], "the timer does not fire")

wait()

equal(expirations(pending), 1, "uncollected expirations")
remaining, interval = left(far)
check(4900 < remaining < 5000 and interval == 7, f"far timer: {remaining} s, interval {interval} s")
check(4800 < left(absolute)[0] < 5000, f"absolute timer: {left(absolute)} s")
for _ in range(3):
    check(select.select([soon], [], [], 10)[0], "the interval timer does not fire")
    expirations(soon)
call("timerfd_settime", pending, 0, timerspec(0.01), None)
check(select.select([pending], [], [], 10)[0], "a timer set again does not fire")
passed()
