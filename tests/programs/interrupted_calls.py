"""Threads in system calls that the kernel itself restarts after a stop: after a resume, none of them returns EINTR, and each
goes on. Half of them were stopped before, so that the kernel's number of their call is another one."""

import ctypes
import os
import signal
import threading

from harness import check, child, equal, passed, process_state, reap, start, until, wait

FUTEX = 202
FUTEX_WAIT, FUTEX_WAKE = 0, 1
LONG_S = 5000

libc = ctypes.CDLL(None, use_errno=True)


class Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class Pollfd(ctypes.Structure):
    _fields_ = [("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short)]


results, threads, kept = {}, {}, []


def in_thread(name, function, *arguments):
    """Makes a call in a thread of its own: its result, or its errno."""

    def run():
        result = function(*arguments)
        results[name] = ctypes.get_errno() if result < 0 else -result

    kept.append(arguments)
    threads[name] = threading.Thread(target=run, daemon=True)
    threads[name].start()


def is_asleep(thread):
    with open(f"/proc/self/task/{thread.native_id}/stat") as file:
        return file.read().rpartition(") ")[2].startswith("S")


def wait_in_all(when):
    """Starts a thread in each of the calls."""
    time = lambda seconds: ctypes.byref(Timespec(seconds, 0))
    in_thread(f"poll {when}", libc.poll, Pollfd(reader, 1, 0), 1, LONG_S * 1000)
    in_thread(f"poll without end {when}", libc.poll, Pollfd(reader, 1, 0), 1, -1)
    in_thread(f"semaphore {when}", libc.sem_timedwait, semaphore, time(1 << 33))
    in_thread(f"nanosleep {when}", libc.nanosleep, time(LONG_S), time(0))
    in_thread(f"clock_nanosleep {when}", libc.clock_nanosleep, 1, 0, time(LONG_S), None)
    until_asleep()


def until_asleep():
    until(lambda: all(map(is_asleep, threads.values())), "all threads wait")


def stop_parent():
    os.kill(os.getppid(), signal.SIGSTOP)
    until(lambda: process_state(os.getppid()) == "T", "the parent stops")
    os.kill(os.getppid(), signal.SIGCONT)


start()
libc.poll.argtypes = [ctypes.POINTER(Pollfd), ctypes.c_ulong, ctypes.c_int]
reader, writer = os.pipe()
word, semaphore = ctypes.c_int(7), ctypes.create_string_buffer(64)
equal(libc.sem_init(semaphore, 0, 0), 0, "sem_init")
wait_in_all("before a stop")
reap(child(stop_parent))
equal(results, {}, "calls that a stop has ended")
wait_in_all("after it")
# The number of a call that is made like this is nowhere in the code.
limit = ctypes.byref(Timespec(LONG_S, 0))
in_thread("futex", libc.syscall, FUTEX, ctypes.byref(word), FUTEX_WAIT, 7, limit, None, 0)
until_asleep()

wait()

equal(results, {}, "calls that have ended too early")
check(all(map(is_asleep, threads.values())), "a thread does not wait")
os.write(writer, b"x")
for _ in range(2):
    equal(libc.sem_post(semaphore), 0, "sem_post")
until(lambda: libc.syscall(FUTEX, ctypes.byref(word), FUTEX_WAKE, 1, None, None, 0) == 1, "the thread at the futex")
expected = {name: -1 if name.startswith("poll") else 0 for name in threads if "sleep" not in name}
until(lambda: len(results) == len(expected), "calls")
equal(results, expected, "results")
passed()
