"""SysV semaphores and a message queue: values and messages kept; a child that waits is let in afterwards."""

import atexit
import ctypes
import os
import struct

from harness import child, equal, passed, process_state, reap, start, until, wait
from linux import call

IPC_CREAT, IPC_EXCL, IPC_RMID, GETVAL, SETVAL = 0o1000, 0o2000, 0, 12, 16
KEY = 0x436C0000 | (os.getpid() & 0xFFFF)


def add(number, change):
    """semop() on one semaphore of the set; a checkpoint may interrupt it, as a stop signal does."""
    while True:
        try:
            return call("semop", semaphores, struct.pack("Hhh", number, change, 0), 1)
        except InterruptedError:
            pass


def send(kind, text):
    call("msgsnd", queue, struct.pack("q", kind) + text, len(text), 0)


def receive(kind):
    raw = bytearray(100)
    length = call("msgrcv", queue, (ctypes.c_char * 100).from_buffer(raw), 92, kind, 0)
    return bytes(raw[8 : 8 + length])


start()
semaphores = call("semget", KEY, 3, IPC_CREAT | IPC_EXCL | 0o600)
queue = call("msgget", KEY, IPC_CREAT | IPC_EXCL | 0o600)
main = os.getpid()


def remove():
    if os.getpid() == main:
        call("semctl", semaphores, 0, IPC_RMID)
        call("msgctl", queue, IPC_RMID, None)


atexit.register(remove)
call("semctl", semaphores, 0, SETVAL, 7)
add(0, -2)
send(2, b"second kind")
send(1, b"first kind")
pid = child(lambda: add(1, -3))
until(lambda: process_state(pid) == "S", "the child sleeps")

wait()

equal(call("semget", KEY, 3, 0), semaphores, "ID of the set")
equal([call("semctl", semaphores, n, GETVAL) for n in range(3)], [5, 0, 0], "values")
add(1, 4)
reap(pid)
equal(call("semctl", semaphores, 1, GETVAL), 1, "value after the child's turn")
equal(receive(1), b"first kind", "message taken by its kind")
equal(receive(0), b"second kind", "next message")
send(3, b"later")
equal(receive(3), b"later", "message sent afterwards")
passed()
