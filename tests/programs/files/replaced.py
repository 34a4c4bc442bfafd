"""Habits of replacing files: other inodes get their names."""

import ctypes
import errno
import json
import os

from habit import Habit, equal, exchange, libc, names, pause, read, sync_dir, write


class tmp_rename(Habit):
    """A file is written under another name and renamed."""

    DURABLE = False

    def begin(self):
        self.content = None

    def step(self, n):
        content = self.block(n, 20_000 + n)
        write(self.path("state.tmp"), content)
        if self.DURABLE:
            fd = os.open(self.path("state.tmp"), os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)
        pause()
        os.rename(self.path("state.tmp"), self.path("state"))
        self.content = content
        if self.DURABLE:
            sync_dir(self.dir)

    def check(self, n):
        if n:
            equal(read(self.path("state")) == self.content, True, "the state is right")
            equal(names(self.dir), ["state"], "names")


class tmp_rename_fsync(tmp_rename):
    """The same, with fsync of the file and of the directory."""

    DURABLE = True


class tmp_rename_same_length(Habit):
    """The replaced file always has the same length, and is large enough that a kill hits the writing."""

    def begin(self):
        self.content = None

    def step(self, n):
        content = bytes([n % 251]) * (2 << 20)
        fd = os.open(self.path("ckpt.tmp"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for at in range(0, len(content), 256 << 10):
            os.write(fd, content[at : at + (256 << 10)])
            pause()
        os.close(fd)
        os.rename(self.path("ckpt.tmp"), self.path("ckpt"))
        self.content = content

    def check(self, n):
        if n:
            equal(read(self.path("ckpt")) == self.content, True, "the checkpoint is right")


class existing_json(Habit):
    """A JSON file of an earlier job, which is read, changed and replaced in each step."""

    def prepare(self):
        with open(self.path("state.json"), "w") as file:
            json.dump({"total": 5, "last": None}, file)

    def begin(self):
        self.total, self.last = 5, None

    def step(self, n):
        with open(self.path("state.json")) as file:
            state = json.load(file)
        equal(state, {"total": self.total, "last": self.last}, "the state")
        self.total, self.last = self.total + n, self.line(n)
        new = json.dumps({"total": self.total, "last": self.last}).encode()
        write(self.path(".state.json.new"), new)
        os.replace(self.path(".state.json.new"), self.path("state.json"))

    def check(self, n):
        equal(json.loads(read(self.path("state.json")))["total"], self.total, "the total")


class backup_rename(Habit):
    """The old file is renamed to a backup first, so that there is a moment without the file."""

    def begin(self):
        self.now, self.before = None, None

    def step(self, n):
        if n:
            os.rename(self.path("state"), self.path("state.bak"))
            self.before = self.now
            pause()
        self.now = self.block(n, 3000)
        write(self.path("state"), self.now)

    def check(self, n):
        if n:
            equal(read(self.path("state")) == self.now, True, "the state is right")
        if n > 1:
            equal(read(self.path("state.bak")) == self.before, True, "the backup is right")


class replaced_while_open(Habit):
    """A file is replaced while the job still reads the one before."""

    def begin(self):
        self.old, self.old_content, self.content = None, None, None

    def step(self, n):
        content = self.block(n, 5000)
        write(self.path("new"), content)
        if self.old:
            self.old.close()
            self.old = None
        if n:
            self.old = open(self.path("state"), "rb", buffering=0)
            self.old_content = self.content
            equal(self.old.read(100), self.content[:100], "the beginning of the state")
        pause()
        os.rename(self.path("new"), self.path("state"))
        self.content = content

    def check(self, n):
        if self.old:
            self.old.seek(0)
            equal(self.old.read() == self.old_content, True, "the state before is right")
        if n:
            equal(read(self.path("state")) == self.content, True, "the state is right")


class delete_recreate(Habit):
    """A file is deleted and made anew."""

    def begin(self):
        self.content = None

    def step(self, n):
        if n:
            os.unlink(self.path("state"))
        pause()
        self.content = self.block(n, 1000 + n)
        write(self.path("state"), self.content, os.O_WRONLY | os.O_CREAT | os.O_EXCL)

    def check(self, n):
        if n:
            equal(read(self.path("state")) == self.content, True, "the state is right")


class come_and_go(Habit):
    """Files with names of their own that live for some steps, as shards and caches do."""

    LIFE = 4

    def step(self, n):
        write(self.path(f"part-{n:05}"), self.block(n, 800))
        pause()
        if n >= self.LIFE:
            os.unlink(self.path(f"part-{n - self.LIFE:05}"))

    def check(self, n):
        alive = range(max(0, n - self.LIFE), n)
        equal(names(self.dir), [f"part-{step:05}" for step in alive], "names")
        for step in alive:
            equal(read(self.path(f"part-{step:05}")) == self.block(step, 800), True, f"part {step} is right")


class deletes_old_files(Habit):
    """Files of an earlier job, of which the job deletes one every few steps."""

    COUNT = 60

    def prepare(self):
        for number in range(self.COUNT):
            with open(self.path(f"old-{number:03}"), "wb") as file:
                file.write(self.block(number, 500))

    def begin(self):
        self.deleted = 0

    def step(self, n):
        if n % 5 == 4 and self.deleted < self.COUNT:
            os.unlink(self.path(f"old-{self.deleted:03}"))
            self.deleted += 1
        pause()

    def check(self, n):
        alive = range(self.deleted, self.COUNT)
        equal(names(self.dir), [f"old-{number:03}" for number in alive], "names")
        for number in alive:
            equal(read(self.path(f"old-{number:03}")) == self.block(number, 500), True, f"{number} is right")


class lock_file(Habit):
    """A file with the process's ID that is made with O_EXCL and removed."""

    def begin(self):
        self.runs = 0

    def step(self, n):
        fd = os.open(self.path("lock"), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        os.write(fd, f"{os.getpid()}\n".encode())
        os.close(fd)
        pause()
        equal(read(self.path("lock")), f"{os.getpid()}\n".encode(), "the lock")
        pause()
        os.unlink(self.path("lock"))
        self.runs += 1

    def check(self, n):
        equal(names(self.dir), [], "names")
        equal(self.runs, n, "the runs")


class pid_file(Habit):
    """A file with the process's ID that stays, as daemons have it; it is removed at the end."""

    def begin(self):
        fd = os.open(self.path("pid"), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        os.write(fd, f"{os.getpid()}\n".encode())
        os.close(fd)

    def step(self, n):
        pause()

    def check(self, n):
        equal(read(self.path("pid")), f"{os.getpid()}\n".encode(), "the ID")

    def end(self):
        os.unlink(self.path("pid"))


class swapped(Habit):
    """Two files exchange their names with RENAME_EXCHANGE; one of them changes."""

    def begin(self):
        self.a, self.b = b"a", b"b"
        write(self.path("a"), self.a)
        write(self.path("b"), self.b)

    def step(self, n):
        exchange(self.path("a"), self.path("b"))
        self.a, self.b = self.b, self.a
        pause()
        with open(self.path("a"), "ab") as file:
            file.write(self.line(n).encode())
        self.a += self.line(n).encode()

    def check(self, n):
        equal(read(self.path("a")), self.a, "a")
        equal(read(self.path("b")), self.b, "b")


class linked_when_complete(Habit):
    """A file without a name (O_TMPFILE) that gets its name when it is complete; the file before is unlinked."""

    def begin(self):
        self.content = None

    def step(self, n):
        fd = os.open(self.dir, os.O_TMPFILE | os.O_WRONLY, 0o644)
        content = self.block(n, 4000)
        os.write(fd, content[:2000])
        pause()
        os.write(fd, content[2000:])
        if n:
            os.unlink(self.path("state"))
        at_cwd, follow = -100, 0x400
        source = f"/proc/self/fd/{fd}".encode()
        if libc.linkat(at_cwd, source, at_cwd, self.path("state").encode(), follow) != 0:
            # CRIU restores a file without a name as one that was unlinked, and that cannot get a name again.
            equal(ctypes.get_errno(), errno.ENOENT, "error of linkat")
            write(self.path("state"), content)
        os.close(fd)
        self.content = content

    def check(self, n):
        if n:
            equal(read(self.path("state")) == self.content, True, "the state is right")
            equal(names(self.dir), ["state"], "names")
