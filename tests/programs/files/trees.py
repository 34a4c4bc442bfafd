"""Habits of using names, links, modes and directories."""

import hashlib
import os
import shutil
import stat
import tempfile

from habit import Habit, equal, libc, names, pause, read, write

AT_FDCWD = -100
RENAME_EXCHANGE = 2


class hard_links(Habit):
    """Names of one file that are made and removed; it is written through one and read through another."""

    def begin(self):
        self.content = b""
        write(self.path("first"), b"")

    def step(self, n):
        if n % 3 == 0:
            os.link(self.path("first"), self.path(f"link-{n // 3 % 4}"))
        elif n % 12 == 11:
            for name in names(self.dir)[1:]:
                os.unlink(self.path(name))
                pause()
        last = names(self.dir)[-1]
        with open(self.path(last), "ab") as file:
            file.write(self.line(n).encode())
        self.content += self.line(n).encode()
        pause()

    def check(self, n):
        present = names(self.dir)
        links = 1 + (n % 12 + 2) // 3
        equal(len(present), links, "number of names")
        for name in present:
            equal(os.stat(self.path(name)).st_nlink, links, f"links of {name}")
            equal(read(self.path(name)), self.content, name)


class link_replace(Habit):
    """A hard link keeps the version before: link, then replace by rename."""

    def begin(self):
        self.now, self.before = self.block(-1, 2000), None
        write(self.path("state"), self.now)

    def step(self, n):
        if n:
            os.unlink(self.path("previous"))
        os.link(self.path("state"), self.path("previous"))
        self.before = self.now
        pause()
        self.now = self.block(n, 2000)
        write(self.path("tmp"), self.now)
        os.rename(self.path("tmp"), self.path("state"))

    def check(self, n):
        equal(read(self.path("state")) == self.now, True, "the state is right")
        if n:
            equal(read(self.path("previous")) == self.before, True, "the state before is right")
            inodes = {os.stat(self.path(name)).st_ino for name in ("state", "previous")}
            equal(len(inodes), 2, "number of inodes")


class symlink_swap(Habit):
    """`current` points to the newest version and is replaced by rename; older versions are deleted."""

    KEEP = 3

    def step(self, n):
        write(self.path(f"v{n}"), self.block(n, 900))
        os.symlink(f"v{n}", self.path("current.tmp"))
        pause()
        os.rename(self.path("current.tmp"), self.path("current"))
        if n >= self.KEEP:
            os.unlink(self.path(f"v{n - self.KEEP}"))

    def check(self, n):
        if n:
            equal(os.readlink(self.path("current")), f"v{n - 1}", "current")
            equal(read(self.path("current")) == self.block(n - 1, 900), True, "the newest version is right")
            versions = {f"v{step}" for step in range(max(0, n - self.KEEP), n)}
            equal(set(names(self.dir)), versions | {"current"}, "names")


class symlink_anew(Habit):
    """A symbolic link that is removed and made anew, as `ln -sf` does."""

    def begin(self):
        for number in range(3):
            write(self.path(f"target-{number}"), self.block(number, 10))

    def step(self, n):
        if n:
            os.unlink(self.path("link"))
        pause()
        os.symlink(f"target-{n % 3}", self.path("link"))

    def check(self, n):
        if n:
            equal(os.readlink(self.path("link")), f"target-{(n - 1) % 3}", "the link")


class directory_rename(Habit):
    """A directory is filled under another name, and takes the place of the one before."""

    def step(self, n):
        os.mkdir(self.path("new"))
        for number in range(3):
            write(self.path(f"new/{number}"), self.block(f"{n} {number}", 700))
        if n:
            os.rename(self.path("now"), self.path("old"))
            pause()
        os.rename(self.path("new"), self.path("now"))
        if n:
            shutil.rmtree(self.path("old"))

    def check(self, n):
        if n:
            equal(names(self.dir), ["now"], "names")
            for number in range(3):
                right = read(self.path(f"now/{number}")) == self.block(f"{n - 1} {number}", 700)
                equal(right, True, f"file {number} is right")


class directory_moves(Habit):
    """A directory with a growing file that moves to another name in each step; its files stay the same inodes."""

    def begin(self):
        self.content = b""
        os.makedirs(self.path("at-0/deep"))
        write(self.path("at-0/deep/log"), b"")

    def step(self, n):
        os.rename(self.path(f"at-{n}"), self.path(f"at-{n + 1}"))
        pause()
        with open(self.path(f"at-{n + 1}/deep/log"), "ab") as file:
            file.write(self.line(n).encode())
        self.content += self.line(n).encode()

    def check(self, n):
        equal(names(self.dir), [f"at-{n}"], "names")
        equal(read(self.path(f"at-{n}/deep/log")), self.content, "the log")


class moved_between(Habit):
    """A queue: files move through the directories of their states."""

    STATES = ("waiting", "working", "done")

    def begin(self):
        for state in self.STATES:
            os.mkdir(self.path(state))

    def step(self, n):
        write(self.path(f"waiting/{n}"), self.block(n, 300))
        pause()
        if n >= 2:
            os.rename(self.path(f"waiting/{n - 2}"), self.path(f"working/{n - 2}"))
        if n >= 4:
            os.rename(self.path(f"working/{n - 4}"), self.path(f"done/{n - 4}"))
        pause()
        if n >= 10:
            os.unlink(self.path(f"done/{n - 10}"))

    def check(self, n):
        want = {
            "waiting": range(max(0, n - 2), n),
            "working": range(max(0, n - 4), max(0, n - 2)),
            "done": range(max(0, n - 10), max(0, n - 4)),
        }
        for state, steps in want.items():
            equal(set(names(self.path(state))), {str(step) for step in steps}, state)
            for step in steps:
                right = read(self.path(f"{state}/{step}")) == self.block(step, 300)
                equal(right, True, f"{state}/{step} is right")


class modes_and_times(Habit):
    """chmod, utime and, for root, chown, of files whose content does not change."""

    def begin(self):
        self.want = {}
        os.mkdir(self.path("dir"))
        for name in ("file", "dir"):
            if name == "file":
                write(self.path(name), b"content\n")
            self.change(name, -1)

    def change(self, name, n):
        path, mode = self.path(name), (0o600, 0o640, 0o755, 0o700)[n % 4]
        owner = (n % 5, n % 7) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
        os.chown(path, *owner)
        os.chmod(path, mode)
        pause()
        os.utime(path, ns=(n + 10**18, n * 1000 + 10**18))
        # A resume does not put back the times of directories.
        self.want[name] = (mode, *owner, n * 1000 + 10**18 if name == "file" else None)

    def step(self, n):
        self.change("file", n)
        pause()
        self.change("dir", n + 1)

    def check(self, n):
        for name, want in self.want.items():
            found = os.stat(self.path(name))
            time_ns = found.st_mtime_ns if name == "file" else None
            got = (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid, time_ns)
            equal(got, want, f"mode, owner and modification time of {name}")
        equal(read(self.path("file")), b"content\n", "the content")


class temporary_trees(Habit):
    """Directories of mkdtemp that are filled, and removed some steps later."""

    LIFE = 3

    def begin(self):
        self.trees = []

    def step(self, n):
        tree = tempfile.mkdtemp(dir=self.dir)
        self.trees.append((n, tree))
        os.makedirs(os.path.join(tree, "a/b"))
        for name in ("one", "a/two", "a/b/three"):
            write(os.path.join(tree, name), self.block(f"{n} {name}", 200))
        if len(self.trees) > self.LIFE:
            shutil.rmtree(self.trees.pop(0)[1])

    def check(self, n):
        equal(names(self.dir), sorted(os.path.basename(tree) for _, tree in self.trees), "names")
        for step, tree in self.trees:
            for name in ("one", "a/two", "a/b/three"):
                right = read(os.path.join(tree, name)) == self.block(f"{step} {name}", 200)
                equal(right, True, f"{name} of step {step} is right")

    def end(self):
        for _, tree in self.trees:
            shutil.rmtree(tree)


class special_files(Habit):
    """FIFOs and empty directories that come and go."""

    def step(self, n):
        if n:
            os.unlink(self.path("fifo"))
            os.rmdir(self.path(f"empty-{n - 1}"))
        pause()
        os.mkfifo(self.path("fifo"), (0o600, 0o644)[n % 2])
        os.mkdir(self.path(f"empty-{n}"))

    def check(self, n):
        if n:
            equal(names(self.dir), [f"empty-{n - 1}", "fifo"], "names")
            mode = os.lstat(self.path("fifo")).st_mode
            equal((stat.S_ISFIFO(mode), stat.S_IMODE(mode)), (True, (0o600, 0o644)[(n - 1) % 2]), "the FIFO")


class changes_kind(Habit):
    """One name is a file, a directory and a symbolic link in turn."""

    def begin(self):
        write(self.path("target"), b"target\n")

    def step(self, n):
        path = self.path("thing")
        if n:
            (os.unlink, shutil.rmtree, os.unlink)[(n - 1) % 3](path)
        pause()
        if n % 3 == 0:
            write(path, self.block(n, 100))
        elif n % 3 == 1:
            os.mkdir(path)
            write(os.path.join(path, "inside"), self.block(n, 100))
        else:
            os.symlink("target", path)

    def check(self, n):
        path = self.path("thing")
        if n == 0:
            return
        if n % 3 == 1:
            equal(read(path) == self.block(n - 1, 100), True, "the file is right")
        elif n % 3 == 2:
            equal(read(os.path.join(path, "inside")) == self.block(n - 1, 100), True, "its file is right")
        else:
            equal(os.readlink(path), "target", "the link")


class random_tree(Habit):
    """Any operation on any name of a small tree, in any order. What a name is shows before each one."""

    MOST_NAMES = 30
    OPERATIONS = 3

    def begin(self):
        self.number = 0
        self.held = []
        self.known = self.state()

    def state(self):
        """Of each name, and of each open file: what can be seen of it."""
        found = {}
        for dir, _, files in os.walk(self.dir):
            for path in [dir, *(os.path.join(dir, name) for name in files)]:
                about = os.lstat(path)
                of = (oct(about.st_mode), about.st_uid, about.st_gid)
                if stat.S_ISREG(about.st_mode):
                    of += (about.st_nlink, hashlib.sha256(read(path)).hexdigest()[:12])
                elif stat.S_ISLNK(about.st_mode):
                    of += (os.readlink(path),)
                found[path] = of
        for number, fd in self.held:
            about = os.fstat(fd)
            content = hashlib.sha256(os.pread(fd, about.st_size, 0)).hexdigest()[:12]
            found[number] = (oct(about.st_mode), about.st_nlink, content)
        return found

    def step(self, n):
        random = self.random(n)
        for _ in range(self.OPERATIONS):
            equal(self.state(), self.known, f"the tree before {self.number}")
            self.operation(random)
            self.number += 1
            self.known = self.state()
            pause()

    def new(self, random, kind):
        """A name that may be taken, by one of this kind."""
        return os.path.join(random.choice(self.dirs()), f"{kind}{random.randrange(self.MOST_NAMES)}")

    def dirs(self):
        return sorted(dir for dir, _, _ in os.walk(self.dir))

    def names(self):
        return sorted(os.path.join(dir, name) for dir, _, files in os.walk(self.dir) for name in files)

    def operation(self, random):
        operations = [name for name in vars(type(self)) if name.startswith("do_")]
        # A name that is taken, a missing file, a directory below itself.
        try:
            getattr(self, random.choice(operations))(random)
        except (OSError, IndexError, shutil.Error):
            pass

    def file(self, random):
        """A regular file."""
        return random.choice([path for path in self.names() if stat.S_ISREG(os.lstat(path).st_mode)])

    def own(self):
        return [0, 1, 65534] if os.geteuid() == 0 else [os.geteuid()]

    def do_write(self, random):
        write(self.new(random, "f"), random.randbytes(random.randrange(9000)))

    def do_write_in_place(self, random):
        with open(self.file(random), "r+b") as file:
            file.seek(random.randrange(9000))
            pause()
            file.write(random.randbytes(300))

    def do_append(self, random):
        with open(self.file(random), "ab") as file:
            file.write(random.randbytes(300))

    def do_truncate(self, random):
        os.truncate(self.file(random), random.randrange(12000))

    def do_rename(self, random):
        os.rename(random.choice(self.names()), self.new(random, "f"))

    def do_exchange(self, random):
        paths = [os.fsencode(self.file(random)) for _ in range(2)]
        libc.renameat2(AT_FDCWD, paths[0], AT_FDCWD, paths[1], RENAME_EXCHANGE)

    def do_link(self, random):
        path, held = self.file(random), [os.fstat(fd).st_ino for _, fd in self.held]
        # Of an open file, the name that it was opened by has to stay in its directory.
        if os.stat(path).st_ino not in held:
            os.link(path, self.new(random, "f"))

    def do_symlink(self, random):
        os.symlink(random.choice(["f1", "d2/f3", "missing/none"]), self.new(random, "f"))

    def do_unlink(self, random):
        os.unlink(random.choice(self.names()))

    def do_chmod(self, random):
        os.chmod(self.file(random), random.choice([0o644, 0o600, 0o755, 0o400, 0o4755]))

    def do_chown(self, random):
        os.chown(self.file(random), random.choice(self.own()), -1)

    def do_mkdir(self, random):
        os.mkdir(self.new(random, "d"), random.choice([0o755, 0o700]))

    def do_rename_directory(self, random):
        os.rename(random.choice(self.dirs()[1:]), self.new(random, "d"))

    def do_remove_tree(self, random):
        shutil.rmtree(random.choice(self.dirs()[1:]))

    def do_unnamed(self, random):
        """A file without a name that gets one."""
        fd = os.open(random.choice(self.dirs()), os.O_TMPFILE | os.O_RDWR, 0o640)
        try:
            os.write(fd, random.randbytes(1000))
            pause()
            os.link(f"/proc/self/fd/{fd}", self.new(random, "f"), follow_symlinks=True)
        finally:
            os.close(fd)

    def do_hold(self, random):
        path = self.file(random)
        if os.stat(path).st_nlink == 1:
            self.held.append((self.number, os.open(path, os.O_RDWR | os.O_APPEND)))
        if len(self.held) > 4:
            os.close(self.held.pop(0)[1])

    def do_write_held(self, random):
        os.write(random.choice(self.held)[1], random.randbytes(200))


class odd_names(Habit):
    """Names with spaces, quotes, newlines, glob characters, other scripts and encodings, rewritten in place."""

    NAMES = ("a b", "new\nline", 'quo"te', "back\\slash", "[x]*?", "naïve-日本", "-rf", ".hidden", "x" * 200)
    # Bytes that are no UTF-8: Latin-1, and others.
    NAMES += tuple(os.fsdecode(name) for name in (b"caf\xe9", b"\xff\xfe"))

    def begin(self):
        self.last = {}

    def step(self, n):
        name = self.NAMES[n % len(self.NAMES)]
        write(self.path(name), self.line(n).encode())
        self.last[name] = self.line(n).encode()

    def check(self, n):
        equal(set(names(self.dir)), set(self.last), "names")
        for name, content in self.last.items():
            equal(read(self.path(name)), content, name)
