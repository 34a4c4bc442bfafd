"""Processes: starting them with a limit, and ending all that was started."""

import ctypes
import os
import signal
import subprocess
import sys
import time

from harness.records import Fail

PR_SET_CHILD_SUBREAPER = 36
# Limits are so many times as long where the bundle itself is tried: that machine may be slow.
PATIENCE = 5 if os.environ.get("BUNDLE_QUICK") == "1" else 1


def adopt_orphans():
    """From now on, whatever loses its parent below this process becomes its child, so that it is found and ended."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        print(f"orphans are not found here: prctl failed with {ctypes.get_errno()}", file=sys.stderr)


def children(pid):
    found = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                found += [int(word) for word in file.read().split()]
    except OSError:
        pass  # it has just ended
    return found


def descendants(pid):
    found, open_ = [], [pid]
    while open_:
        below = children(open_.pop())
        found += below
        open_ += below
    return found


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


def kill(pid):
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def reap():
    """Collects children that have ended and that nobody waits for."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def end_all(pid=None, patience_s=20):
    """Kills all that is below a process, this one if none is named, and waits until it is gone."""
    pid = pid or os.getpid()
    end = time.monotonic() + patience_s * PATIENCE
    while True:
        alive = [one for one in descendants(pid) if is_alive(one)]
        for one in alive:
            kill(one)
        if pid == os.getpid():
            reap()
        if not alive or time.monotonic() > end:
            return alive
        time.sleep(0.02)


def run(argv, limit_s, log=None, apart=False, **options):
    """Runs a command to its end; gives its exit code and what it said. A limit that it passes is a failure. With a log,
    what it says is there at once; `apart`: what it says of errors is given only if it fails."""
    limit_s *= PATIENCE
    if log:
        with open(log, "w+", errors="replace") as file:
            code = run_logged(argv, limit_s, file, options)
            file.seek(0)
            return code, file.read()
    process = subprocess.Popen(
        [str(word) for word in argv],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if apart else subprocess.STDOUT,
        start_new_session=True,
        text=True,
        errors="replace",
        **options,
    )
    try:
        said, errors = process.communicate(timeout=max(limit_s, 0.1))
    except subprocess.TimeoutExpired:
        for pid in descendants(process.pid):
            kill(pid)
        process.kill()
        said, _ = process.communicate()
        raise Fail(f"{shown(argv)} was not done after {limit_s:.0f} s: {tail(said)}") from None
    return process.returncode, said + errors if apart and process.returncode else said


def run_logged(argv, limit_s, file, options):
    words = [str(word) for word in argv]
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True, **options
    )
    try:
        return process.wait(timeout=max(limit_s, 0.1))
    except subprocess.TimeoutExpired:
        for pid in descendants(process.pid) + [process.pid]:
            kill(pid)
        process.wait()
        raise Fail(f"{shown(argv)} was not done after {limit_s:.0f} s; what it said is in the log") from None


def ok(argv, limit_s, **options):
    """What a command said that has to succeed."""
    code, said = run(argv, limit_s, **options)
    if code != 0:
        raise Fail(f"{shown(argv)} failed with {code}: {tail(said)}")
    return said


def shown(argv):
    return " ".join([os.path.basename(str(argv[0]))] + [str(word) for word in argv[1:6]])


def tail(text, lines=6):
    return " | ".join([line for line in text.splitlines() if line.strip()][-lines:])[-900:]


def until(what, condition, limit_s, alive=lambda: None):
    """Polls until the condition gives something. `alive` says what is wrong once it is of no use to wait."""
    limit_s *= PATIENCE
    end = time.monotonic() + limit_s
    while True:
        value = condition()
        if value is not None and value is not False:
            return value
        wrong = alive()
        if wrong:
            raise Fail(f"waiting for {what}: {wrong}")
        if time.monotonic() > end:
            raise Fail(f"waited in vain for {what}, {limit_s:.0f} s")
        time.sleep(0.001)
