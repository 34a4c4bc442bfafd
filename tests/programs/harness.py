"""What every program here shares: the log, the wait for the checkpoint and the verdict.

A program puts state into one kind of resource, calls wait(), and checks afterwards
that the state is still there and that the resource still works.

In the working directory: `log` (one line `started`, then `pass` or `fail: ...`),
`ready` (the program is set up) and `go` (made by the runner: go on and check).
Exit code 0: passed. 1: failed. 77: this kind is not available here.
"""

import faulthandler
import os
import sys
import time
import traceback

# Nothing here takes as long, on a machine that does other things too.
WAIT_CAP_S = 300
CHECK_CAP_S = 300
POLL_S = 0.01
UNAVAILABLE = 77

_dir = os.getcwd()
_log = -1


def start():
    """Says that the program runs from its beginning: once in the life of a job."""
    global _log
    _log = os.open("log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(_log, b"started\n")


def await_go(tick=None):
    """Polls for the file `go`; calls `tick` on each round. For children of the program."""
    deadline = time.monotonic() + WAIT_CAP_S
    go = os.path.join(_dir, "go")
    while not os.path.exists(go):
        check(time.monotonic() < deadline, f"no `go` within {WAIT_CAP_S} s")
        if tick:
            tick()
        time.sleep(POLL_S)


def wait(tick=None):
    """Writes `ready`, waits for `go`, then starts the watchdog of the checks that follow."""
    tmp = os.path.join(_dir, "ready.tmp")
    os.close(os.open(tmp, os.O_WRONLY | os.O_CREAT, 0o644))
    os.rename(tmp, os.path.join(_dir, "ready"))
    await_go(tick)
    faulthandler.dump_traceback_later(CHECK_CAP_S, exit=True)


def check(cond, wrong):
    """Ends the program as failed, from any thread or child of it, unless `cond` holds."""
    if not cond:
        os.write(_log, f"fail: {wrong}\n".encode())
        print(f"fail: {wrong}", file=sys.stderr, flush=True)
        os._exit(1)


def equal(got, want, what):
    """check() that two values are equal; the message has both."""
    check(got == want, f"{what}: {got!r}, expected {want!r}")


def passed():
    faulthandler.cancel_dump_traceback_later()
    os.write(_log, b"pass\n")
    print("pass", flush=True)
    sys.exit(0)


def unavailable(why):
    """Ends the program: the kernel or the machine does not have this kind."""
    print(f"not available: {why}", file=sys.stderr, flush=True)
    os._exit(UNAVAILABLE)


def child(run, *args):
    """Forks a child that runs `run(*args)` and exits with 0, or 1 on an exception."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        run(*args)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def reap(pid, want=0):
    """Waits for a child and checks its exit code (negative: the signal that ended it)."""
    _, status = os.waitpid(pid, 0)
    equal(os.waitstatus_to_exitcode(status), want, f"exit code of child {pid}")


def until(cond, what, cap_s=120):
    """Polls until `cond()` is true; fails after `cap_s` seconds."""
    deadline = time.monotonic() + cap_s
    while not cond():
        check(time.monotonic() < deadline, f"{what}: not within {cap_s} s")
        time.sleep(POLL_S)


def read_exactly(fd, n):
    """Reads n bytes from a descriptor, or what there is before its end."""
    data = b""
    while len(data) < n and (part := os.read(fd, n - len(data))):
        data += part
    return data


def process_state(pid):
    """The one-letter state of a process: 'S' sleeps, 'Z' is a zombie."""
    with open(f"/proc/{pid}/stat") as f:
        return f.read().rpartition(")")[2].split()[0]
