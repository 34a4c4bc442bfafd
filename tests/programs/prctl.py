"""Process settings (prctl): thread names, death signal, subreaper, dumpable, no new privileges."""

import ctypes
import os
import signal
import threading
import time

from harness import await_go, child, equal, passed, reap, start, wait
from linux import call

PR_SET_PDEATHSIG, PR_GET_DUMPABLE, PR_SET_NAME = 1, 3, 15
MAIN_NAME, THREAD_NAME = b"main-named-caf\xc3", b"thread \xff\n\\"
PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_GET_NO_NEW_PRIVS = 36, 37, 38, 39


def prctl(option, value=0):
    return call("prctl", option, value, 0, 0, 0)


def get(option):
    value = ctypes.c_int()
    call("prctl", option, ctypes.byref(value), 0, 0, 0)
    return value.value


def name():
    with open("/proc/thread-self/comm", "rb") as f:
        return f.read().strip()


def dies_with_parent():
    signal.signal(signal.SIGUSR1, lambda *_: os._exit(42))
    prctl(PR_SET_PDEATHSIG, signal.SIGUSR1)
    os.write(w, str(os.getpid()).encode())
    time.sleep(1000)


def parent():
    child(dies_with_parent)
    await_go()


start()
r, w = os.pipe()
prctl(PR_SET_CHILD_SUBREAPER, 1)
prctl(PR_SET_NO_NEW_PRIVS, 1)
# The kernel cuts names after 15 bytes, also in the middle of a character.
call("prctl", PR_SET_NAME, MAIN_NAME + b"\xa9", 0, 0, 0)
names, go, ready = [], threading.Event(), threading.Event()


def named():
    call("prctl", PR_SET_NAME, THREAD_NAME, 0, 0, 0)
    ready.set()
    go.wait(60)
    names.append(name())


thread = threading.Thread(target=named)
thread.start()
ready.wait(10)
pid = child(parent)
grandchild = int(os.read(r, 100))

wait()

go.set()
thread.join(20)
equal((name(), names), (MAIN_NAME, [THREAD_NAME]), "names")
equal(get(PR_GET_CHILD_SUBREAPER), 1, "subreaper")
equal(prctl(PR_GET_NO_NEW_PRIVS), 1, "no new privileges")
equal(prctl(PR_GET_DUMPABLE), 1, "dumpable")
reap(pid)
reap(grandchild, 42)
passed()
