"""A listening vsock socket (to a virtual machine's host)."""

import socket

import _path  # noqa: F401
from harness import check, equal, passed, start, unavailable, wait

start()
try:
    sock = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
    sock.bind((socket.VMADDR_CID_ANY, socket.VMADDR_PORT_ANY))
    sock.listen(1)
except OSError as e:
    unavailable(e)
name = sock.getsockname()

wait()

equal(sock.getsockname(), name, "address")
sock.settimeout(0.1)
try:
    sock.accept()
    check(False, "a connection from nowhere")
except TimeoutError:
    pass
passed()
