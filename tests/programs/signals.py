"""Handlers, masks, ignored and pending signals (of the process and of a thread), the signal stack."""

import ctypes
import os
import signal
import struct
import threading

from harness import check, equal, passed, start, until, wait
from linux import call

OURS = {signal.SIGUSR2, signal.SIGRTMIN}
OTHER = OURS | {signal.SIGTERM}

start()
seen = []
for signo in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGRTMIN):
    signal.signal(signo, lambda s, _: seen.append(s))
signal.signal(signal.SIGHUP, signal.SIG_IGN)
stack = ctypes.create_string_buffer(1 << 16)
call("sigaltstack", struct.pack("qi4xQ", ctypes.addressof(stack), 0, 1 << 16), None)
go, told = threading.Event(), threading.Event()
in_thread = {}


def other_thread():
    signal.pthread_sigmask(signal.SIG_SETMASK, OTHER)
    signal.pthread_kill(threading.get_ident(), signal.SIGUSR2)
    told.set()
    go.wait(60)
    in_thread["mask"] = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    in_thread["pending"] = signal.sigpending() - {signal.SIGRTMIN}


thread = threading.Thread(target=other_thread)
thread.start()
told.wait(10)
signal.pthread_sigmask(signal.SIG_BLOCK, OURS)
for _ in range(3):
    os.kill(os.getpid(), signal.SIGRTMIN)  # real-time signals queue
signal.pthread_kill(threading.get_ident(), signal.SIGUSR2)

wait()

equal(seen, [], "signals delivered too early")
equal(signal.pthread_sigmask(signal.SIG_BLOCK, ()), OURS, "mask")
equal(signal.sigpending(), OURS, "pending signals")
go.set()
thread.join(20)
equal(in_thread["mask"], OTHER, "mask of the thread")
equal(in_thread["pending"], {signal.SIGUSR2}, "pending signals of the thread")
old = ctypes.create_string_buffer(24)
call("sigaltstack", None, old)
equal(struct.unpack("qi4xQ", old.raw), (ctypes.addressof(stack), 0, 1 << 16), "signal stack")
os.kill(os.getpid(), signal.SIGHUP)
os.kill(os.getpid(), signal.SIGUSR1)
until(lambda: seen == [signal.SIGUSR1], "handler of a signal sent afterwards")
seen.clear()
for _ in range(3):
    check(signal.sigtimedwait([signal.SIGRTMIN], 0), "a queued real-time signal is lost")
signal.pthread_sigmask(signal.SIG_UNBLOCK, OURS)
until(lambda: seen, "handler of the pending signal")
equal(seen, [signal.SIGUSR2], "signals delivered in the end")
passed()
