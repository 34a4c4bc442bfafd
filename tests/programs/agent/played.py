"""Plays an agent of the interposer, without a GPU: what it answers is in files of the working directory.

`quiesce`: why it refuses to go away. `lost`: what it has lost when it is back. `delay_s`: how long it takes to come
back. `absent`: it does not come back while there is this file. It writes the requests that it has refused to `refused`, and ends when there is a file `go`.

`memory`: what it has in device memory at the beginning, if anything; after each checkpoint that becomes one character
longer. It writes the numbers of its mirrors to `mirrors`, the attempts that were given up to `unstaged`, and whence its
memory came back to `deliveries`: `parked` or `mirror`.

`rank`: it is a rank of NCCL. It writes the orders of the cut to `orders`, and answers them unless there is a file
`silent`.
"""

import json
import mmap
import os
import select
import socket
import struct
import sys
import time

PATH = os.environ["CKPT_AGENT_SOCKET"]
LOOK_S = 0.01
MARK = b"\xfd"
MIRROR_BYTES = 5 << 20
OFFSET = 3 << 20


def content(name):
    if not os.path.exists(name):
        return None
    with open(name) as file:
        return file.read()


def note(name, line):
    with open(name, "a") as file:
        print(line, file=file)


def start_time_ticks():
    return int(content("/proc/self/stat").rpartition(")")[2].split()[19])


def say(connection, **message):
    text = json.dumps(message).encode()
    connection.sendall(struct.pack("<I", len(text)) + text)


def exactly(connection, count):
    data = connection.recv(count, socket.MSG_WAITALL)
    if len(data) < count:
        raise ConnectionError("the launcher is gone")
    return data


def hear(connection):
    (length,) = struct.unpack("<I", exactly(connection, 4))
    return json.loads(exactly(connection, length))


def open_file_from(connection):
    mark, (fd,), _, _ = socket.recv_fds(connection, 1, 1)
    assert mark == MARK
    return fd


class Gpu:
    """Device memory, played."""

    def __init__(self, memory):
        self.memory = memory and memory.encode()
        self.is_detached = False
        self.mirror = None
        self.known = None
        self.key = 0

    def stage(self, connection, mirror, bytes, **_):
        fd = open_file_from(connection)
        self.mirror = mmap.mmap(fd, bytes)
        os.close(fd)
        assert bytes >= MIRROR_BYTES, bytes
        if self.known and self.known[0] == mirror:
            self.check(self.mirror, self.known[1])
        self.known = (mirror, self.memory)
        note("mirrors", mirror)

    def unstage(self):
        self.mirror.close()
        self.mirror = self.known = None

    def check(self, mirror, memory):
        assert mirror[OFFSET : OFFSET + len(memory)] == memory, mirror[OFFSET : OFFSET + len(memory)]

    def detach(self, connection):
        """Returns what the launcher is told of it."""
        self.mirror[OFFSET : OFFSET + len(self.memory)] = self.memory
        self.mirror.close()
        self.mirror = None
        fd = os.memfd_create("parked")
        os.write(fd, self.memory)
        self.key += 1
        say(connection, type="park", pid=os.getpid(), keys=[[0, self.key]], instance=1)
        socket.send_fds(connection, [MARK], [fd])
        os.close(fd)
        assert hear(connection) == {"type": "parked", "is_kept": True}
        self.is_detached = True
        region = {"address": 0x7F0000000000, "bytes": len(self.memory), "device": 0, "kind": "allocation"}
        region |= {"allocations": 1, "offset": OFFSET, "changed_bytes": 1}
        return {
            "regions": [region],
            "counts": {"contexts": 1, "streams": 2, "events": 3, "modules": 4, "graphs": 5, "allocations": 1},
            "times": {},
            "parked_bytes": len(self.memory),
        }

    def attach(self, connection):
        """Returns how many bytes were copied back."""
        deliver = hear(connection)
        assert deliver["type"] == "deliver" and deliver["mirror"] == self.known[0], deliver
        fd = open_file_from(connection)
        with mmap.mmap(fd, deliver["bytes"]) as mirror:
            self.check(mirror, self.memory)
        os.close(fd)
        say(connection, type="unpark", pid=os.getpid(), keys=[[0, self.key]])
        is_parked = hear(connection) == {"type": "unparked", "count": 1}
        if is_parked:
            fd = open_file_from(connection)
            assert os.pread(fd, 1000, 0) == self.memory
            os.close(fd)
            # It is other memory from now on.
            say(connection, type="withdraw", pid=os.getpid(), keys=[[0, self.key]])
            assert hear(connection) == {"type": "withdrawn"}
        copied_bytes = 0 if is_parked else len(self.memory)
        note("deliveries", "mirror" if copied_bytes else "parked")
        self.is_detached = False
        self.memory += b"."
        return copied_bytes


def connected():
    while not os.path.exists(PATH):
        time.sleep(LOOK_S)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(PATH)
    return connection


def greet(connection, away, gpu):
    hello = {"version": 3, "pid": os.getpid(), "start_time_ticks": start_time_ticks(), "exe": sys.executable}
    hello["parks_by_key"] = True
    if away is not None:
        hello |= {"away": away, "is_detached": gpu.is_detached}
    if os.path.exists("rank"):
        hello |= {"supports_cut": True}
    say(connection, type="hello", **hello)
    assert hear(connection) == {"type": "welcome", "version": 3}


def obey(connection, order, attempt=None, version=0, **_):
    note("orders", order)
    if order == "release" or os.path.exists("silent"):
        return
    member = {"communicator": [1, 2], "index": 0}
    member = {"member": member, "role": {"communicator": {}}, "sequence": 5, "call": "ncclAllReduce"}
    report = {"attempt": attempt, "version": version, "in_call": 0, "members": [member], "parked": ["ncclAllReduce"]}
    say(connection, type="steps", report=report)


def converse(connection, gpu):
    """Returns the attempt that it goes away for; None at the end of the job."""
    while not os.path.exists("go"):
        if not select.select([connection], [], [], LOOK_S)[0]:
            continue
        request = hear(connection)
        if request["type"] == "cut":
            obey(connection, **request["order"])
            continue
        kind, attempt = request.pop("type"), request["attempt"]
        if kind == "prepare":
            say(connection, type="needs", attempt=attempt, mirror_bytes=MIRROR_BYTES if gpu.memory else 0)
        elif kind == "stage":
            gpu.stage(connection, **request)
            say(connection, type="staged", attempt=attempt)
        elif kind == "unstage":
            gpu.unstage()
            note("unstaged", attempt)
        else:
            assert kind == "quiesce" and request["timeout_ms"] > 0, request
            reason = content("quiesce")
            if reason is None:
                report = {"gpu": gpu.detach(connection)} if gpu.memory else {}
                say(connection, type="quiesced", attempt=attempt, **report)
                return attempt
            note("refused", attempt)
            say(connection, type="failed", attempt=attempt, reason=reason)
    return None


def come_back(connection, away, gpu, restored):
    copied_bytes = gpu.attach(connection) if gpu.is_detached else 0
    lost = content("lost")
    back = {"restored": restored, "copied_bytes": copied_bytes, **({"lost": lost} if lost else {})}
    say(connection, type="back", attempt=away, **back)


def main():
    away = None
    gpu = Gpu(content("memory"))
    began_ticks = start_time_ticks()
    note("log", "started")
    while True:
        connection = connected()
        try:
            greet(connection, away, gpu)
            if away is not None:
                come_back(connection, away, gpu, restored=start_time_ticks() != began_ticks)
                began_ticks = start_time_ticks()
        except ConnectionError:
            note("lost_connections", "")
            connection.close()
            continue
        note("ready", "")
        away = converse(connection, gpu)
        connection.close()
        if away is None:
            note("log", "pass")
            return
        delay_s = float(content("delay_s") or 0)
        while not os.path.exists(PATH) or os.path.exists("absent"):
            time.sleep(LOOK_S)
        time.sleep(delay_s)


main()
