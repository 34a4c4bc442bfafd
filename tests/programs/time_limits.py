"""Waits with a time limit, which has to end although the job is saved all the time."""

import ctypes
import select
import sys
import threading
import time

from harness import check, equal, passed, start, until

LIMIT_S = int(sys.argv[1])
results = {}


class Pollfd(ctypes.Structure):
    _fields_ = [("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short)]


libc = ctypes.CDLL(None, use_errno=True)
libc.poll.argtypes = [ctypes.POINTER(Pollfd), ctypes.c_ulong, ctypes.c_int]


def poll():
    results["poll"] = libc.poll(None, 0, LIMIT_S * 1000)


def epoll():
    results["epoll"] = select.epoll().poll(LIMIT_S)


start()
begun_s = time.monotonic()
for function in poll, epoll:
    threading.Thread(target=function).start()
epoll()
until(lambda: len(results) == 2, "all limits")
equal(results, {"poll": 0, "epoll": []}, "results")
check(time.monotonic() - begun_s >= LIMIT_S, "a wait has ended too early")
passed()
