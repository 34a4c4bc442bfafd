"""A unix stream connection to an echo server outside the job, whose path is the argument."""

import socket
import sys

import _path  # noqa: F401
from harness import equal, passed, start, wait

start()
sock = socket.socket(socket.AF_UNIX)
sock.settimeout(20)
sock.connect(sys.argv[1])
sock.send(b"before")
equal(sock.recv(100), b"before", "echo before")

wait()

sock.send(b"afterwards")
equal(sock.recv(100), b"afterwards", "echo")
passed()
