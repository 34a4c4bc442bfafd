"""TCP connections inside the tree with more queued than the other end takes: full buffers, both ways."""

import hashlib
import os
import socket

from harness import await_go, child, equal, passed, reap, start, wait

CONNECTIONS = 2
BUFFER = 1 << 17
BLOCK = 1 << 12


def fill(sock, seed):
    """Sends until nothing more is taken; returns a hash of what was."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
    sent = hashlib.sha256()
    sock.setblocking(False)
    try:
        while True:
            block = hashlib.sha512(seed).digest() * (BLOCK // 64)
            sent.update(block[: sock.send(block)])
            seed = block[:64]
    except BlockingIOError:
        pass
    sock.setblocking(True)
    return sent.digest()


def drain(sock):
    """Receives up to the end; returns a hash of everything."""
    received = hashlib.sha256()
    while part := sock.recv(BLOCK):
        received.update(part)
    return received.digest()


def serve(address, names):
    """The other end of each connection."""
    # It is opened before the connections, also in a resume: see `lease_holder.py`.
    os.open("late", os.O_RDWR | os.O_CREAT, 0o644)
    ends = []
    for name in names:
        sock = socket.create_connection(address)
        sock.sendall(name)
        ends.append(sock)
    sent = [fill(sock, b"up" + name) for sock, name in zip(ends, names)]
    ready.sendall(b"full")
    await_go()
    for sock in ends:
        sock.shutdown(socket.SHUT_WR)
    for sock, digest in zip(ends, sent):
        ready.sendall(digest + drain(sock))


start()
server = socket.create_server(("127.0.0.1", 0))
ours, ready = socket.socketpair()
names = [bytes([number]) for number in range(CONNECTIONS)]
pid = child(serve, server.getsockname(), names)
ends = {}
for _ in names:
    sock = server.accept()[0]
    ends[sock.recv(1)] = sock
sent = {name: fill(ends[name], b"down" + name) for name in names}
equal(ours.recv(4), b"full", "the other end's buffers")

wait()

for sock in ends.values():
    sock.shutdown(socket.SHUT_WR)
received = {name: drain(ends[name]) for name in names}
for name in names:
    theirs = ours.recv(64, socket.MSG_WAITALL)
    equal(received[name], theirs[:32], "what the other end sent")
    equal(theirs[32:], sent[name], "what the other end received")
reap(pid)
passed()
