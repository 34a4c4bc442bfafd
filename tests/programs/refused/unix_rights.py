"""Two processes have sent each other descriptors by one pair of sockets: CRIU restores one of them only."""

import os
import socket

import _path  # noqa: F401
from harness import await_go, child, equal, passed, reap, start, wait

start()
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
is_set_up = os.pipe()


def send(sock, text):
    file = os.open(text, os.O_RDWR | os.O_CREAT)
    os.write(file, text.encode())
    os.lseek(file, 0, os.SEEK_SET)
    socket.send_fds(sock, [b"file"], [file])
    os.close(file)


def check(sock, text):
    data, fds, _, _ = socket.recv_fds(sock, 100, 10)
    equal((data, os.read(fds[0], 100)), (b"file", text.encode()), "message and file")


def run():
    ours.close()
    send(theirs, "from the child")
    os.write(is_set_up[1], b"x")
    await_go()
    check(theirs, "from the parent")


pid = child(run)
theirs.close()
send(ours, "from the parent")
os.read(is_set_up[0], 1)

wait()

check(ours, "from the child")
reap(pid)
passed()
