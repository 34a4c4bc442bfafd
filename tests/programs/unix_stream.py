"""A unix stream pair of parent and child: data in flight each way, a half-closed pair, later use."""

import socket

from harness import await_go, child, equal, passed, reap, start, wait

start()
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
half_a, half_b = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


def serve():
    ours.close()
    theirs.send(b"queued up")
    await_go()
    data = b""
    while len(data) < 20000:
        data += theirs.recv(20000 - len(data))
    equal(data, b"q" * 20000, "data queued down")
    theirs.send(theirs.recv(100).upper())
    equal(theirs.recv(1), b"", "end of the stream")


pid = child(serve)
ours.sendall(b"q" * 20000)
half_b.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 70_000)
sndbuf = half_b.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
half_a.send(b"last words")
half_a.shutdown(socket.SHUT_WR)
equal(ours.recv(3), b"que", "start of the child's data")
theirs.close()
ours.settimeout(20)

wait()

equal(ours.recv(6, socket.MSG_WAITALL), b"ued up", "rest of the child's data")
ours.send(b"later")
equal(ours.recv(100), b"LATER", "echo")
equal(half_b.recv(100), b"last words", "data queued in the half-closed pair")
equal(half_b.recv(100), b"", "end of the half-closed pair")
equal(half_b.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF), sndbuf, "SO_SNDBUF")
half_b.send(b"back")
equal(half_a.recv(100), b"back", "open half of the half-closed pair")
ours.close()
reap(pid)
passed()
