"""POSIX timers: ID, remaining time, interval and signal kept; one goes on firing, new ones work."""

import ctypes
import signal
import struct
import time

from harness import check, equal, passed, start, until, wait
from linux import call, from_timerspec, timerspec

SIGEV_SIGNAL = 0
fired = []


def create(signo, value, first_s, interval_s):
    event = struct.pack("qii", value, signo, SIGEV_SIGNAL) + bytes(48)
    timer = ctypes.c_void_p()
    call("timer_create", time.CLOCK_MONOTONIC, event, ctypes.byref(timer))
    call("timer_settime", timer, 0, timerspec(first_s, interval_s), None)
    return timer


def left(timer):
    raw = ctypes.create_string_buffer(32)
    call("timer_gettime", timer, raw)
    return from_timerspec(raw.raw)


start()
signal.signal(signal.SIGRTMIN, lambda *_: fired.append(1))
signal.signal(signal.SIGRTMIN + 1, lambda *_: fired.append(2))
ticking = create(signal.SIGRTMIN, 1, 0.05, 0.05)
far = create(signal.SIGRTMIN + 1, 2, 5000, 7)
until(lambda: fired, "first tick")

wait()

remaining, interval = left(far)
check(4900 < remaining < 5000 and interval == 7, f"far timer: {remaining} s, interval {interval} s")
equal(round(left(ticking)[1], 6), 0.05, "interval of the ticking timer")
fired.clear()
until(lambda: len(fired) >= 3, "three more ticks")
call("timer_settime", far, 0, timerspec(0.01), None)
until(lambda: 2 in fired, "far timer, set to fire now")
call("timer_delete", ticking)
third = create(signal.SIGRTMIN, 3, 5000, 0)
check(left(third)[0] > 4000, "a new timer does not work")
passed()
