"""TCP connections inside the tree that one end has closed for sending, with data on its way: each end in turns."""

import os
import socket

from harness import await_go, child, equal, passed, reap, start, wait

CONNECTIONS = 8
DATA = bytes(range(256)) * 200
BACK = b"back"


def connection(number, sock, is_child):
    """Closes one direction if it is this end's turn; returns what is to be done after the resume."""
    sock.settimeout(60)
    if (number % 2 == 0) == is_child:
        sock.sendall(DATA)
        sock.shutdown(socket.SHUT_WR)
        return lambda: equal(sock.recv(len(BACK), socket.MSG_WAITALL), BACK, f"open direction of connection {number}")

    def answer():
        equal(sock.recv(2 * len(DATA), socket.MSG_WAITALL), DATA, f"closed direction of connection {number}")
        sock.sendall(BACK)

    return answer


def serve():
    socks = [socket.create_connection(address) for _ in range(CONNECTIONS)]
    rest = [connection(number, sock, True) for number, sock in enumerate(socks)]
    os.write(ready, b"x")
    await_go()
    for finish in rest:
        finish()


start()
server = socket.create_server(("127.0.0.1", 0))
address = server.getsockname()
begun, ready = os.pipe()
pid = child(serve)
ends = [server.accept()[0] for _ in range(CONNECTIONS)]
rest = [connection(number, sock, False) for number, sock in enumerate(ends)]
os.read(begun, 1)

wait()

for finish in rest:
    finish()
reap(pid)
passed()
