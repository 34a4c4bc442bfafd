"""What the habits of writing files share.

A habit writes files in its own way, one step after another, and keeps in memory what they must contain.
`check()` compares the files with the memory. A job that is resumed with files of another moment fails there.

Everything is computed from the name of the habit and the number of the step: two runs of the same number of
steps leave the same files.
"""

import ctypes
import fcntl
import hashlib
import os
import random
import signal
import sys
import time

# The length of a pause. A step has several, so that a snapshot and a kill hit the middle of a step.
PAUSE_S = 0.003
UNAVAILABLE = 77
PR_SET_PDEATHSIG = 1

# Commands to the processes of a habit.
STEP, END = b"s", b"e"

_slow_while = None
libc = ctypes.CDLL(None, use_errno=True)


class Wrong(Exception):
    """The files contradict the memory."""


class Habit:
    """One habit in its own directory `self.dir`, which exists when `begin` is called."""

    # A habit with other processes begins first: they must not inherit the files of other habits.
    forks = False

    def __init__(self, dir):
        self.dir = dir
        self.name = type(self).__name__

    def path(self, name):
        return os.path.join(self.dir, name)

    def prepare(self):
        """Makes files that exist before the job starts."""

    def begin(self):
        """The first thing that the job does."""

    def step(self, n):
        """One step."""

    def check(self, n):
        """Compares the files with the memory, after n steps."""

    def end(self):
        """The last thing that the job does."""

    def line(self, n, who=""):
        """The line of step n."""
        digest = hashlib.sha256(f"{self.name} {who} {n}".encode()).hexdigest()[:24]
        return f"{self.name} {who}{n} {digest}\n"

    def block(self, n, size):
        """The bytes of step n."""
        return self.random(n).randbytes(size)

    def random(self, n):
        """A generator that depends on the habit and the step only."""
        return random.Random(f"{self.name} {n}")


def set_slow_while(path):
    """Makes `pause` sleep as long as this file exists."""
    global _slow_while
    _slow_while = path


def pause():
    """Leaves time for a snapshot or a kill."""
    if _slow_while and os.path.exists(_slow_while):
        time.sleep(PAUSE_S)


def equal(got, want, what):
    """Raises Wrong unless both are equal."""
    if got != want:
        raise Wrong(f"{what}: {short(got)}, expected {short(want)}")


def short(value):
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:150]}...{text[-150:]} ({len(value)} long)"


def read(path):
    with open(path, "rb") as file:
        return file.read()


def write(path, data, flags=os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode=0o644):
    """Writes a file in two parts, with a pause between them."""
    fd = os.open(path, flags, mode)
    try:
        half = len(data) // 2
        write_all(fd, data[:half])
        pause()
        write_all(fd, data[half:])
    finally:
        os.close(fd)


def write_all(fd, data):
    while data:
        data = data[os.write(fd, data) :]


def sync_dir(path):
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(fd)
    os.close(fd)


def names(path):
    """The sorted names in a directory."""
    return sorted(os.listdir(path))


class Expected:
    """What a file must contain that only grows: its length and a hash of its content."""

    def __init__(self):
        self.bytes = 0
        self.hash = hashlib.sha256()

    def add(self, data):
        self.bytes += len(data)
        self.hash.update(data)

    def check(self, content, what):
        equal(len(content), self.bytes, f"length of {what}")
        equal(hashlib.sha256(content).hexdigest(), self.hash.hexdigest(), f"hash of {what}")


class Workers:
    """Processes that each do `work(index, n)` when they are told to, all at the same time."""

    def __init__(self, count, work):
        self.ends = []
        self.pids = []
        for index in range(count):
            (command_r, command_w), (answer_r, answer_w) = os.pipe(), os.pipe()
            pid = os.fork()
            if pid == 0:
                # Otherwise the processes outlive a program that fails.
                libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                self._serve(index, work, command_r, answer_w)
            os.close(command_r)
            os.close(answer_w)
            self.ends.append((command_w, answer_r))
            self.pids.append(pid)

    @staticmethod
    def _serve(index, work, commands, answers):
        done = 0
        try:
            while os.read(commands, 1) == STEP:
                work(index, done)
                done += 1
                os.write(answers, b".")
            os._exit(0)
        except BaseException as error:
            print(f"fail: worker {index} at step {done}: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)

    def step(self):
        for command, _ in self.ends:
            os.write(command, STEP)
        for index, (_, answer) in enumerate(self.ends):
            equal(os.read(answer, 1), b".", f"answer of worker {index}")

    def end(self):
        for command, _ in self.ends:
            os.write(command, END)
        for pid in self.pids:
            equal(os.waitpid(pid, 0)[1], 0, "status of a worker")


def fallocate(fd, mode, offset, length):
    """fallocate(2) with a mode, which Python does not have."""
    args = [ctypes.c_int(fd), ctypes.c_int(mode), ctypes.c_longlong(offset), ctypes.c_longlong(length)]
    if libc.fallocate(*args) != 0:
        raise OSError(ctypes.get_errno(), "fallocate")


def exchange(a, b):
    """renameat2(2) with RENAME_EXCHANGE."""
    at_cwd = -100
    if libc.renameat2(at_cwd, a.encode(), at_cwd, b.encode(), 2) != 0:
        raise OSError(ctypes.get_errno(), "renameat2")


class locked:
    """An exclusive flock for a with statement."""

    def __init__(self, file):
        self.file = file

    def __enter__(self):
        fcntl.flock(self.file, fcntl.LOCK_EX)

    def __exit__(self, *_):
        fcntl.flock(self.file, fcntl.LOCK_UN)
