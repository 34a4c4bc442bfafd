"""Descriptors in flight (SCM_RIGHTS) in unix stream and seqpacket pairs: received afterwards, they work."""

import os
import socket

from harness import equal, passed, start, wait

start()
pairs = {}
for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
    pairs[kind] = socket.socketpair(socket.AF_UNIX, kind)
    r, w = os.pipe()
    file = os.open(f"file-{kind.name}", os.O_RDWR | os.O_CREAT)
    os.write(file, b"0123456789")
    os.lseek(file, 4, os.SEEK_SET)
    os.write(w, b"in the pipe")
    socket.send_fds(pairs[kind][0], [b"take them"], [r, w, file])
    for fd in (r, w, file):
        os.close(fd)

wait()

for kind, (sender, receiver) in pairs.items():
    receiver.settimeout(20)
    data, fds, _, _ = socket.recv_fds(receiver, 100, 10)
    equal((data, len(fds)), (b"take them", 3), f"message and descriptors ({kind.name})")
    r, w, file = fds
    equal(os.read(r, 100), b"in the pipe", f"data of the pipe in flight ({kind.name})")
    os.write(w, b"later")
    equal(os.read(r, 100), b"later", f"pipe in use ({kind.name})")
    equal(os.read(file, 100), b"456789", f"offset of the file in flight ({kind.name})")
    socket.send_fds(sender, [b"again"], [r])
    equal(len(socket.recv_fds(receiver, 100, 1)[1]), 1, f"descriptor sent later ({kind.name})")
passed()
