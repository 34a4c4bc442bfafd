"""A child in its own mount namespace: CRIU dumps it and cannot restore it, so refuse it."""

import os

import _path  # noqa: F401
from harness import await_go, check, child, passed, reap, start, unavailable, wait
from linux import call

CLONE_NEWNS = 0x00020000
start()
r, w = os.pipe()


def apart():
    try:
        call("unshare", CLONE_NEWNS)
    except OSError:
        os.write(w, b"refused")
        return
    os.write(w, b"apart")
    await_go()


pid = child(apart)
if os.read(r, 100) == b"refused":
    unavailable("no mount namespace")

wait()

reap(pid)
check(os.path.exists("go"), "the file system is lost")
passed()
