"""Descriptors in flight (SCM_RIGHTS) between processes, each way, with messages around them: all are received in order."""

import os
import socket

from harness import await_go, child, equal, passed, reap, start, wait


def send(sock, own):
    """Descriptors that nobody else has, and one that the sender keeps."""
    r, w = os.pipe()
    os.write(w, b"in the pipe")
    sock.send(b"before ")
    socket.send_fds(sock, [b"with "], [r, w, own])
    os.close(r)
    os.close(w)
    sock.send(b"after")


def check(sock, what):
    sock.settimeout(20)
    data, fds = b"", []
    while len(data) < len(b"before with after"):
        part, received, _, _ = socket.recv_fds(sock, 100, 10)
        data, fds = data + part, fds + received
        if not part:
            break
    equal((data, len(fds)), (b"before with after", 3), f"messages and descriptors {what}")
    r, w, file = fds
    equal(os.read(r, 100), b"in the pipe", f"data of the pipe {what}")
    os.write(w, b"later")
    equal(os.read(r, 100), b"later", f"pipe in use {what}")
    equal((os.lseek(file, 0, os.SEEK_CUR), os.pread(file, 100, 0)), (4, b"0123456789"), f"file {what}")


def open_file(name):
    file = os.open(name, os.O_RDWR | os.O_CREAT)
    os.write(file, b"0123456789")
    os.lseek(file, 4, os.SEEK_SET)
    return file


start()
kinds = (socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM)
down = [socket.socketpair(socket.AF_UNIX, kind) for kind in kinds]
up = [socket.socketpair(socket.AF_UNIX, kind) for kind in kinds]
is_set_up = os.pipe()


def run():
    for ours, _ in down + up:
        ours.close()
    own = open_file("child's")
    for _, theirs in up:
        # The other direction has messages without descriptors.
        send(theirs, own)
    os.write(is_set_up[1], b"x")
    await_go()
    for _, theirs in down:
        check(theirs, "to the child")
    for _, theirs in up:
        equal(theirs.recv(100), b"plain", "message against the stream")


pid = child(run)
own = open_file("parent's")
for ours, theirs in down + up:
    theirs.close()
for ours, _ in down:
    send(ours, own)
for ours, _ in up:
    ours.send(b"plain")
os.read(is_set_up[0], 1)

wait()

for ours, _ in up:
    check(ours, "to the parent")
reap(pid)
passed()
