"""A process whose parent has died goes on, with the same PID, group, session and foster parent."""

import os

from harness import await_go, check, child, equal, passed, reap, start, until, wait

start()
up_r, up_w = os.pipe()
down_r, down_w = os.pipe()


def ids():
    return f"{os.getpid()} {os.getppid()} {os.getpgid(0)} {os.getsid(0)}".encode()


def orphan(parent):
    until(lambda: os.getppid() != parent, "the parent's death")
    os.write(up_w, ids())
    await_go()
    os.write(up_w, ids())
    os.read(down_r, 1)


def parent():
    os.setpgid(0, 0)
    child(orphan, os.getpid())


reap(child(parent))
before = os.read(up_r, 100)
check(int(before.split()[1]) != os.getpid(), "the orphan is a child of the program")

wait()

equal(os.read(up_r, 100), before, "PID, parent, group and session")
pid = int(before.split()[0])
os.close(up_w)
os.write(down_w, b"x")
equal(os.read(up_r, 1), b"", "end of the pipe when the orphan ends")
until(lambda: not os.path.exists(f"/proc/{pid}"), "the orphan is reaped")
passed()
