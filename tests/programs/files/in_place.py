"""Habits of changing files in place."""

import fcntl
import mmap
import os
import struct
import tempfile

from habit import Habit, Workers, equal, fallocate, pause, read, write_all

KEEP_SIZE = 1
PUNCH_HOLE = 2
BLOCK = 4096


class _Counter(Habit):
    """A counter of 8 bytes."""

    START = 0

    def begin(self):
        self.count = self.START

    def step(self, n):
        with open(self.path("counter"), "r+b") as file:
            (count,) = struct.unpack("<Q", file.read(8))
            equal(count, self.count, "the counter")
            pause()
            file.seek(0)
            file.write(struct.pack("<Q", count + 1))
        self.count += 1

    def check(self, n):
        equal(read(self.path("counter")), struct.pack("<Q", self.count), "the counter")


class existing_counter(_Counter):
    """A counter that exists before the job starts."""

    START = 1000

    def prepare(self):
        with open(self.path("counter"), "wb") as file:
            file.write(struct.pack("<Q", self.START))


class made_counter(_Counter):
    """A counter that the job makes."""

    def begin(self):
        super().begin()
        with open(self.path("counter"), "wb") as file:
            file.write(struct.pack("<Q", 0))


class late_counter(_Counter):
    """A counter of an earlier job that this one changes from step 20 on: nothing is known of it before."""

    START = 77

    def prepare(self):
        with open(self.path("counter"), "wb") as file:
            file.write(struct.pack("<Q", self.START))

    def step(self, n):
        if n >= 20:
            super().step(n)


class kept_counter(_Counter):
    """A counter whose file is kept open."""

    def begin(self):
        super().begin()
        self.fd = os.open(self.path("counter"), os.O_RDWR | os.O_CREAT, 0o644)
        os.pwrite(self.fd, struct.pack("<Q", 0), 0)

    def step(self, n):
        (count,) = struct.unpack("<Q", os.pread(self.fd, 8, 0))
        equal(count, self.count, "the counter")
        pause()
        os.pwrite(self.fd, struct.pack("<Q", count + 1), 0)
        self.count += 1


class outside_counter(made_counter):
    """A counter in a directory that is not below the working directory."""


class shared_counter(Habit):
    """A counter that several processes raise under a lock of the file."""

    forks = True
    WRITERS = 3

    def begin(self):
        with open(self.path("counter"), "wb") as file:
            file.write(struct.pack("<Q", 0))

        def work(index, n):
            with open(self.path("counter"), "r+b", buffering=0) as file:
                fcntl.lockf(file, fcntl.LOCK_EX)
                (count,) = struct.unpack("<Q", file.read(8))
                pause()
                file.seek(0)
                file.write(struct.pack("<Q", count + 1))

        self.workers = Workers(self.WRITERS, work)

    def step(self, n):
        self.workers.step()

    def check(self, n):
        equal(read(self.path("counter")), struct.pack("<Q", n * self.WRITERS), "the counter")

    def end(self):
        self.workers.end()


class truncate_rewrite(Habit):
    """A file that is opened with O_TRUNC and written anew."""

    def begin(self):
        self.content = None

    def step(self, n):
        with open(self.path("state"), "wb", buffering=0) as file:
            pause()
            self.content = self.block(n, 100 + n % 7 * 1000)
            file.write(self.content[:50])
            pause()
            file.write(self.content[50:])

    def check(self, n):
        if n:
            equal(read(self.path("state")), self.content, "the state")


class _Image(Habit):
    """A file of which the memory has a copy."""

    BYTES = 256 << 10

    def begin(self):
        self.content = bytearray(self.block(-1, self.BYTES))
        with open(self.path("data"), "wb") as file:
            file.write(self.content)

    def put(self, fd, offset, data):
        end = offset + len(data)
        if end > len(self.content):
            self.content.extend(bytes(end - len(self.content)))
        self.content[offset:end] = data
        os.pwrite(fd, data, offset)

    def check(self, n):
        if read(self.path("data")) != self.content:
            now = read(self.path("data"))
            equal(len(now), len(self.content), "length of the data")
            wrong = next(at for at, byte in enumerate(now) if byte != self.content[at])
            equal(now[wrong : wrong + 16], bytes(self.content[wrong : wrong + 16]), f"the data at {wrong}")


class rewrite_middle(_Image):
    """A file kept open for reading and writing, of which parts in the middle are rewritten."""

    def begin(self):
        super().begin()
        self.file = open(self.path("data"), "r+b", buffering=0)

    def step(self, n):
        for part in range(3):
            offset = self.random(f"{n} {part}").randrange(self.BYTES - 1000)
            self.put(self.file.fileno(), offset, self.block(f"{n} {part}", 1000))
            pause()


class reopened_middle(_Image):
    """The same, opened for each part."""

    def step(self, n):
        for part in range(3):
            offset = self.random(f"{n} {part}").randrange(self.BYTES - 1000)
            with open(self.path("data"), "r+b", buffering=0) as file:
                self.put(file.fileno(), offset, self.block(f"{n} {part}", 1000))
            pause()


class sparse(_Image):
    """Writes far behind the end of a file, which leaves holes."""

    BYTES = 0

    def step(self, n):
        fd = os.open(self.path("data"), os.O_WRONLY)
        self.put(fd, self.random(n).randrange(1 << 20), self.block(n, 500))
        os.close(fd)
        pause()


class punch_holes(_Image):
    """Deallocates parts in the middle of a file, and writes others."""

    def step(self, n):
        at = self.random(n)
        with open(self.path("data"), "r+b", buffering=0) as file:
            offset, length = at.randrange(self.BYTES // 2), at.randrange(1, 5 * BLOCK)
            self.content[offset : offset + length] = bytes(length)
            fallocate(file.fileno(), PUNCH_HOLE | KEEP_SIZE, offset, length)
            pause()
            self.put(file.fileno(), at.randrange(self.BYTES - 1000), self.block(n, 1000))


class preallocated(_Image):
    """Allocates space before writing to it: beyond the end, or with the length."""

    BYTES = 0

    def step(self, n):
        end = len(self.content)
        with open(self.path("data"), "r+b", buffering=0) as file:
            if n % 2:
                os.posix_fallocate(file.fileno(), end, 1500)
                self.content.extend(bytes(1500))
                pause()
                self.put(file.fileno(), end, self.block(n, 700))
            else:
                fallocate(file.fileno(), KEEP_SIZE, end, 8192)
                pause()
                self.put(file.fileno(), end, self.block(n, 700))
        if len(self.content) > 100_000:
            pause()
            del self.content[5000:]
            os.truncate(self.path("data"), 5000)


class shrink_and_grow(_Image):
    """A file that is cut, and extended with zeros."""

    def step(self, n):
        at = self.random(n)
        cut, grown = at.randrange(1000, 100_000), at.randrange(1000, 100_000)
        os.truncate(self.path("data"), min(cut, len(self.content)))
        del self.content[cut:]
        pause()
        os.truncate(self.path("data"), len(self.content) + grown)
        self.content.extend(bytes(grown))
        with open(self.path("data"), "r+b", buffering=0) as file:
            self.put(file.fileno(), at.randrange(len(self.content)), self.block(n, 100))


class ring_file(_Image):
    """A ring of records of constant length with a position in the header, kept open."""

    RECORD = 100
    COUNT = 50
    BYTES = RECORD * (COUNT + 1)

    def begin(self):
        super().begin()
        self.file = open(self.path("data"), "r+b", buffering=0)

    def step(self, n):
        self.put(self.file.fileno(), (n % self.COUNT + 1) * self.RECORD, self.block(n, self.RECORD))
        pause()
        self.put(self.file.fileno(), 0, struct.pack("<Q", n))


class mapped(Habit):
    """A shared mapping that is kept, its file closed."""

    BYTES = 64 << 10

    def begin(self):
        with open(self.path("data"), "w+b") as file:
            file.truncate(self.BYTES)
            self.map = mmap.mmap(file.fileno(), self.BYTES)
        self.content = bytearray(self.BYTES)

    def step(self, n):
        for part in range(3):
            offset = self.random(f"{n} {part}").randrange(self.BYTES - 500)
            data = self.block(f"{n} {part}", 500)
            self.content[offset : offset + 500] = data
            self.map[offset : offset + 500] = data
            pause()

    def check(self, n):
        equal(bytes(self.map) == self.content, True, "the mapping is right")
        equal(read(self.path("data")) == self.content, True, "the file of the mapping is right")


class mapped_anew(mapped):
    """A shared mapping that is made anew in each step: between steps, the file is closed."""

    def begin(self):
        self.content = bytearray(self.BYTES)
        with open(self.path("data"), "wb") as file:
            file.truncate(self.BYTES)

    def step(self, n):
        with open(self.path("data"), "r+b") as file:
            with mmap.mmap(file.fileno(), self.BYTES) as self.map:
                super().step(n)
            self.map = None

    def check(self, n):
        equal(read(self.path("data")) == self.content, True, "the file of the mapping is right")


class mapped_growing(Habit):
    """A file that is extended and mapped anew when it is full, as array libraries do."""

    RECORD = 700

    def begin(self):
        self.content = b""
        self.file = open(self.path("data"), "w+b", buffering=0)
        self.capacity = 0
        self.map = None

    def step(self, n):
        end = len(self.content) + self.RECORD
        if end > self.capacity:
            if self.map:
                self.map.close()
            self.capacity += 16 << 10
            self.file.truncate(self.capacity)
            pause()
            self.map = mmap.mmap(self.file.fileno(), self.capacity)
        data = self.block(n, self.RECORD)
        self.map[len(self.content) : end] = data
        pause()
        self.content += data

    def check(self, n):
        content = read(self.path("data"))
        equal(len(content), self.capacity, "length of the file")
        equal(content.rstrip(b"\0") == self.content.rstrip(b"\0"), True, "the content is right")


class unlinked_temporary(Habit):
    """A file without a name that is kept open: written, and changed in place."""

    def begin(self):
        self.file = tempfile.TemporaryFile(dir=self.dir, buffering=0)
        self.content = bytearray()

    def step(self, n):
        offset = self.random(n).randrange(50_000)
        data = self.block(n, 300)
        self.content.extend(bytes(max(0, offset + 300 - len(self.content))))
        self.content[offset : offset + 300] = data
        self.file.seek(offset)
        write_all(self.file.fileno(), data[:100])
        pause()
        write_all(self.file.fileno(), data[100:])

    def check(self, n):
        self.file.seek(0)
        equal(self.file.read() == self.content, True, "the file without a name is right")
        equal(os.listdir(self.dir), [], "names in the directory")

    def end(self):
        with open(self.path("result"), "wb") as file:
            file.write(self.content)


class old_file_rewritten(_Image):
    """A file of an earlier job with 3 MB, opened for each change."""

    BYTES = 3 << 20

    def prepare(self):
        with open(self.path("data"), "wb") as file:
            file.write(self.block(-1, self.BYTES))

    def begin(self):
        self.content = bytearray(self.block(-1, self.BYTES))

    def step(self, n):
        if n % 4 == 3:
            with open(self.path("data"), "r+b", buffering=0) as file:
                self.put(file.fileno(), self.random(n).randrange(self.BYTES - 5000), self.block(n, 5000))
        pause()
