"""A message of length zero that has descriptors: CRIU takes it for the end of the queue."""

import os
import socket

import _path  # noqa: F401
from harness import equal, passed, start, wait

start()
sender, receiver = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
file = os.open("file", os.O_RDWR | os.O_CREAT)
os.write(file, b"content")
os.lseek(file, 0, os.SEEK_SET)
sender.send(b"before")
socket.send_fds(sender, [b""], [file])
os.close(file)
sender.send(b"after")

wait()

receiver.settimeout(20)
equal(receiver.recv(100), b"before", "message before")
data, fds, _, _ = socket.recv_fds(receiver, 100, 10)
equal((data, os.read(fds[0], 100)), (b"", b"content"), "message and file")
equal(receiver.recv(100), b"after", "message after")
passed()
