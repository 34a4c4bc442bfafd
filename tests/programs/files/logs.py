"""Habits of writing logs: files that grow, and are rotated."""

import csv
import io
import json
import os
import shutil
import struct

from habit import Expected, Habit, Workers, equal, locked, names, pause, read, sync_dir, write_all


class _Log(Habit):
    """A log with a line for each step."""

    def begin(self):
        self.expected = Expected()

    def append(self, data):
        with open(self.path("log"), "ab") as file:
            file.write(data)
        self.expected.add(data)

    def check(self, n):
        if n:
            self.expected.check(read(self.path("log")), "the log")


class kept_append(_Log):
    """A log that is kept open for appending."""

    def begin(self):
        super().begin()
        self.log = open(self.path("log"), "ab", buffering=0)

    def step(self, n):
        data = self.line(n).encode()
        self.log.write(data[:10])
        self.expected.add(data[:10])
        pause()
        self.log.write(data[10:])
        self.expected.add(data[10:])


class kept_log_seek(_Log):
    """A log that is kept open at its end, without O_APPEND: the position comes back with the process."""

    def begin(self):
        super().begin()
        self.log = open(self.path("log"), "wb")

    def step(self, n):
        data = self.line(n).encode()
        self.log.write(data)
        self.log.flush()
        self.expected.add(data)


class reopened_append(_Log):
    """A log that is opened for each line."""

    def step(self, n):
        self.append(self.line(n).encode())
        pause()


class existing_append(reopened_append):
    """The same for a log of an earlier job."""

    def prepare(self):
        with open(self.path("log"), "wb") as file:
            file.write(b"an earlier job\n")

    def begin(self):
        super().begin()
        self.expected.add(b"an earlier job\n")


class outside_append(reopened_append):
    """The same in a directory that is not below the working directory."""


class csv_reopened(_Log):
    """A CSV file with a header, opened for each row."""

    def step(self, n):
        path = self.path("log")
        is_new = not os.path.exists(path)
        equal(is_new, n == 0, "whether the file is new")
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, ["step", "loss", "note"])
        if is_new:
            writer.writeheader()
        writer.writerow({"step": n, "loss": 1 / (n + 1), "note": f'"{n}", quoted'})
        self.append(text.getvalue().encode())
        pause()

    def end(self):
        with open(self.path("log"), newline="") as file:
            rows = [int(row["step"]) for row in csv.DictReader(file)]
        equal(rows, list(range(len(rows))), "the rows")


class many_appenders(Habit):
    """Several processes append to one log that each keeps open. The order of lines is not determined."""

    forks = True
    WRITERS = 3

    def begin(self):
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        fds = [os.open(self.path("log.unordered"), flags, 0o644) for _ in range(self.WRITERS)]

        def work(index, n):
            os.write(fds[index], self.line(n, f"{index}:").encode())
            pause()

        self.workers = Workers(self.WRITERS, work)
        for fd in fds:
            os.close(fd)

    def step(self, n):
        self.workers.step()

    def check(self, n):
        lines = sorted(read(self.path("log.unordered")).decode().splitlines(keepends=True))
        want = sorted(self.line(step, f"{index}:") for step in range(n) for index in range(self.WRITERS))
        equal(lines, want, "the lines")

    def end(self):
        self.workers.end()


class jsonl_flock(Habit):
    """Several processes append JSON lines to one file that they open and lock for each line."""

    forks = True
    WRITERS = 3

    def begin(self):
        def work(index, n):
            record = json.dumps({"writer": index, "step": n, "text": self.line(n)}) + "\n"
            with open(self.path("log.unordered"), "ab", buffering=0) as file, locked(file):
                file.write(record[:20].encode())
                pause()
                file.write(record[20:].encode())

        self.workers = Workers(self.WRITERS, work)

    def step(self, n):
        self.workers.step()

    def check(self, n):
        if n == 0:
            return
        records = [json.loads(line) for line in read(self.path("log.unordered")).splitlines()]
        got = sorted((record["writer"], record["step"]) for record in records)
        equal(got, [(index, step) for index in range(self.WRITERS) for step in range(n)], "the records")

    def end(self):
        self.workers.end()


class rotation(Habit):
    """A log that is renamed when it is full; three older ones are kept."""

    LINES = 7
    KEEP = 3

    def begin(self):
        self.logs = [b""]
        self.file = open(self.path("log"), "ab", buffering=0)

    def step(self, n):
        if n and n % self.LINES == 0:
            self.rotate()
        data = self.line(n).encode()
        self.file.write(data)
        self.logs[0] += data

    def rotate(self):
        self.file.close()
        for number in range(self.KEEP, 0, -1):
            source = self.path(f"log.{number - 1}" if number > 1 else "log")
            if os.path.exists(source):
                os.rename(source, self.path(f"log.{number}"))
                pause()
        self.logs = [b"", *self.logs][: self.KEEP + 1]
        self.file = open(self.path("log"), "ab", buffering=0)

    def check(self, n):
        for number, content in enumerate(self.logs):
            equal(read(self.path(f"log.{number}" if number else "log")), content, f"log {number}")
        equal(len(names(self.dir)), len(self.logs), "how many logs there are")


class late_reopen(Habit):
    """A log that others rename: the job writes some lines into the renamed file before it opens a new one."""

    def begin(self):
        self.logs = {0: b""}
        self.generation = 0
        self.file = open(self.path("log"), "ab", buffering=0)

    def step(self, n):
        if n % 8 == 5:
            os.rename(self.path("log"), self.path(f"log.{self.generation}"))
        if n % 8 == 7:
            self.file.close()
            self.file = open(self.path("log"), "ab", buffering=0)
            self.generation += 1
            self.logs[self.generation] = b""
            if (old := self.generation - 4) >= 0:
                os.unlink(self.path(f"log.{old}"))
                del self.logs[old]
        pause()
        data = self.line(n).encode()
        self.file.write(data)
        self.logs[self.generation] += data

    def check(self, n):
        equal(os.fstat(self.file.fileno()).st_size, len(self.logs[self.generation]), "length of the open log")
        is_renamed = n % 8 in (6, 7)
        for generation, content in self.logs.items():
            is_current = generation == self.generation and not is_renamed
            equal(read(self.path("log" if is_current else f"log.{generation}")), content, f"log {generation}")


class copytruncate(Habit):
    """A log kept open for appending, which is copied and then truncated."""

    LINES = 9

    def begin(self):
        self.now, self.before = b"", None
        self.file = open(self.path("log"), "ab", buffering=0)

    def step(self, n):
        if n and n % self.LINES == 0:
            shutil.copyfile(self.path("log"), self.path("log.1"))
            self.before = self.now
            pause()
            os.truncate(self.path("log"), 0)
            self.now = b""
        data = self.line(n).encode()
        self.file.write(data)
        self.now += data

    def check(self, n):
        equal(read(self.path("log")), self.now, "the log")
        if self.before is not None:
            equal(read(self.path("log.1")), self.before, "the copy")


class tensorboard(_Log):
    """Event files in TensorBoard's format: records with a length and checksums, buffered, the file kept open."""

    def begin(self):
        super().begin()
        self.file = open(self.path("log"), "wb")
        self.record(b"\x09" + struct.pack("<d", 0.0) + b"\x1a\x0dbrain.Event:2")

    def record(self, data):
        length = struct.pack("<Q", len(data))
        record = length + masked_crc(length) + data + masked_crc(data)
        self.file.write(record)
        self.expected.add(record)

    def step(self, n):
        tag = b"train/loss"
        value = b"\x0a" + bytes([len(tag)]) + tag + b"\x15" + struct.pack("<f", 1 / (n + 1))
        summary = b"\x0a" + bytes([len(value)]) + value
        event = b"\x09" + struct.pack("<d", float(n)) + b"\x10" + varint(n)
        self.record(event + b"\x2a" + bytes([len(summary)]) + summary)
        pause()
        if n % 3 == 2:
            self.file.flush()

    def check(self, n):
        self.file.flush()
        super().check(n)

    def end(self):
        self.file.close()
        data = read(self.path("log"))
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            equal(data[8:12], masked_crc(data[:8]), "checksum of a length")
            equal(data[12 + length : 16 + length], masked_crc(data[12 : 12 + length]), "checksum of a record")
            data = data[16 + length :]


def varint(number):
    """An integer of protocol buffers."""
    out = b""
    while number > 0x7F:
        out += bytes([number & 0x7F | 0x80])
        number >>= 7
    return out + bytes([number])


def _crc_table():
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_CRC = _crc_table()


def masked_crc(data):
    """The masked CRC-32C of TFRecord files."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


class synced_append(_Log):
    """A log whose lines are durable before the next step, the directory included."""

    def step(self, n):
        data = self.line(n).encode()
        fd = os.open(self.path("log"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        write_all(fd, data)
        os.fdatasync(fd)
        os.close(fd)
        self.expected.add(data)
        if n == 0:
            sync_dir(self.dir)
