"""Event counters: values and flags kept; a child that waits for one is woken afterwards."""

import os

from harness import check, child, equal, passed, process_state, reap, start, until, wait

start()
plain = os.eventfd(5, os.EFD_NONBLOCK)
empty = os.eventfd(0)
os.eventfd_write(plain, 37)
pid = child(lambda: equal(os.eventfd_read(empty), 7, "value for the waiting child"))
until(lambda: process_state(pid) == "S", "the child sleeps")

wait()

equal(os.eventfd_read(plain), 42, "counter")
try:
    os.eventfd_read(plain)
    check(False, "the counter was not reset by the read")
except BlockingIOError:
    pass
os.eventfd_write(empty, 7)
reap(pid)
passed()
