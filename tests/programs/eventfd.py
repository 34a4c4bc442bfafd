"""Event counters: values and flags kept, also values of more than 32 bits; a child that waits for one is woken afterwards."""

import os

from harness import check, child, equal, passed, process_state, reap, start, until, wait

start()
plain = os.eventfd(5, os.EFD_NONBLOCK)
empty = os.eventfd(0)
# The values of the system call itself have 32 bits.
large = os.eventfd(0)
os.eventfd_write(large, 2**63 + 5)
full = os.eventfd(0)
os.eventfd_write(full, 2**64 - 2)
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
equal(os.eventfd_read(large), 2**63 + 5, "a count of more than 32 bits")
equal(os.eventfd_read(full), 2**64 - 2, "the largest count")
os.eventfd_write(empty, 7)
reap(pid)
passed()
