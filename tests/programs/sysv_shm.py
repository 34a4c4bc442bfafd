"""SysV shared memory: content, key and ID kept; a child attaches to the segment by its key afterwards."""

import atexit
import ctypes
import os

from harness import await_go, check, child, equal, passed, reap, start, until, wait
from linux import call

IPC_CREAT, IPC_EXCL, IPC_RMID, SIZE = 0o1000, 0o2000, 0, 1 << 20
KEY = 0x436B0000 | (os.getpid() & 0xFFFF)
TICKS = 1 << 16


def attach(segment):
    at = call("shmat", segment, None, 0, restype=ctypes.c_void_p)
    return (ctypes.c_char * SIZE).from_address(at)


start()
segment = call("shmget", KEY, SIZE, IPC_CREAT | IPC_EXCL | 0o600)
main = os.getpid()
atexit.register(lambda: os.getpid() == main and call("shmctl", segment, IPC_RMID, None))
memory = attach(segment)
memory[TICKS : TICKS + 5] = b"state"
ticks = 0


def tick():
    global ticks
    memory[ticks] = b"\1"
    ticks += 1


def other_side():
    await_go()
    until(lambda: memory[SIZE - 6 : SIZE] == b"parent", "the parent's change")
    later = attach(call("shmget", KEY, SIZE, 0))
    equal(later[TICKS : TICKS + 5], b"state", "content by key")
    later[SIZE - 5 : SIZE] = b"child"


pid = child(other_side)

wait(tick)

marks = memory[:TICKS].count(b"\1")
check(marks == ticks, f"{marks} marks in shared memory, {ticks} made by this run of the job")
equal(call("shmget", KEY, SIZE, 0), segment, "ID of the segment")
memory[SIZE - 6 : SIZE] = b"parent"
reap(pid)
equal(memory[SIZE - 5 : SIZE], b"child", "content after the child's write")
passed()
