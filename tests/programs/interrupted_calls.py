"""Threads in system calls that the kernel itself restarts after a stop, or that have done nothing when a stop ends them:
none of them returns EINTR, and each goes on. Some are the first thread of their process, some another one. Half of them
were stopped before, so that the kernel's number of their call is another one."""

import ctypes
import mmap
import os
import select
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


results, threads, processes, kept = {}, {}, {}, []


def result_of(function, arguments):
    """The result of a call, or the negative of its errno."""
    result = function(*arguments)
    return -ctypes.get_errno() if result < 0 else result


def in_thread(name, function, *arguments):
    def run():
        results[name] = result_of(function, arguments)

    kept.append(arguments)
    threads[name] = threading.Thread(target=run, daemon=True)
    threads[name].start()


def in_process(name, function, *arguments):
    """In the first thread of a process, which exits with the result or the errno."""
    processes[name] = os.fork()
    if not processes[name]:
        os._exit(abs(result_of(function, arguments)))


def are_asleep():
    stats = [f"/proc/self/task/{thread.native_id}/stat" for thread in threads.values()]
    stats += [f"/proc/{pid}/stat" for pid in processes.values()]

    def is_asleep(path):
        with open(path) as file:
            return file.read().rpartition(") ")[2].startswith("S")

    return all(map(is_asleep, stats))


def wait_in_all(when):
    """Starts a thread and a process in each of the calls."""
    time = lambda seconds: ctypes.byref(Timespec(seconds, 0))
    ready = ctypes.create_string_buffer(12)
    for kind, run in ("thread", in_thread), ("process", in_process):
        run(f"poll, {kind} {when}", libc.poll, Pollfd(reader, 1, 0), 1, LONG_S * 1000)
        run(f"poll without end, {kind} {when}", libc.poll, Pollfd(reader, 1, 0), 1, -1)
        run(f"semaphore, {kind} {when}", libc.sem_timedwait, semaphore, time(1 << 33))
        run(f"nanosleep, {kind} {when}", libc.nanosleep, time(LONG_S), time(0))
        run(f"clock_nanosleep, {kind} {when}", libc.clock_nanosleep, 1, 0, time(LONG_S), None)
        if when == "after it":
            # A stop that is not ours ends it.
            run(f"epoll_wait, {kind}", libc.epoll_wait, epoll.fileno(), ready, 1, -1)
    until(are_asleep, "all wait")


def stop_all():
    for pid in [os.getppid(), *processes.values()]:
        os.kill(pid, signal.SIGSTOP)
        until(lambda: process_state(pid) == "T", "the process stops")
        os.kill(pid, signal.SIGCONT)


start()
libc.poll.argtypes = [ctypes.POINTER(Pollfd), ctypes.c_ulong, ctypes.c_int]
reader, writer = os.pipe()
epoll = select.epoll()
epoll.register(reader, select.EPOLLIN)
shared = mmap.mmap(-1, 4096)
word, semaphore = ctypes.c_int(7), ctypes.byref((ctypes.c_char * 64).from_buffer(shared))
equal(libc.sem_init(semaphore, 1, 0), 0, "sem_init")
wait_in_all("before a stop")
reap(child(stop_all))
equal(results, {}, "calls that a stop has ended")
wait_in_all("after it")
# The number of a call that is made like this is nowhere in the code.
limit = ctypes.byref(Timespec(LONG_S, 0))
in_thread("futex", libc.syscall, FUTEX, ctypes.byref(word), FUTEX_WAIT, 7, limit, None, 0)
until(are_asleep, "all wait")

wait()

equal(results, {}, "calls that have ended too early")
check(are_asleep(), "a thread does not wait")
os.write(writer, b"x")
for _ in range(4):
    equal(libc.sem_post(semaphore), 0, "sem_post")
until(lambda: libc.syscall(FUTEX, ctypes.byref(word), FUTEX_WAKE, 1, None, None, 0) == 1, "the thread at the futex")
expected = {name: 1 if "poll" in name else 0 for name in [*threads, *processes] if "sleep" not in name}
for name, pid in processes.items():
    if "sleep" in name:
        check(process_state(pid) == "S", name)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    else:
        results[name] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
until(lambda: len(results) == len(expected), "calls")
equal(results, expected, "results")
passed()
