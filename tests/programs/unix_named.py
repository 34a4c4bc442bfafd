"""A listening unix socket with a name in another encoding: an open connection goes on, and a new client connects afterwards."""

import os
import socket

from harness import await_go, child, equal, passed, reap, start, wait

# Relative, as many programs do, and not UTF-8.
NAME = os.fsdecode(b"server\xe9.sock")
start()
server = socket.socket(socket.AF_UNIX)
server.bind(NAME)
abstract = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
abstract.bind(b"\0ckpt-run-test-\xff-%d" % os.getpid())
os.chmod(NAME, 0o600)
server.listen(5)
server.settimeout(20)


def call():
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(20)
    sock.connect(NAME)
    return sock


def client():
    server.close()
    old = call()
    old.send(b"queued")
    equal(old.recv(100), b"hello", "greeting")
    await_go()
    old.send(b" later")
    equal(old.recv(100), b"answer", "answer on the old connection")
    new = call()
    new.send(b"new client")
    equal(new.recv(100), b"answer", "answer to the new client")


pid = child(client)
conn, _ = server.accept()
conn.settimeout(20)
conn.send(b"hello")

wait()

data = b""
while len(data) < 12:
    data += conn.recv(12 - len(data))
equal(data, b"queued later", "data of the old connection")
conn.send(b"answer")
new, _ = server.accept()
equal(new.recv(100), b"new client", "data of the new connection")
new.send(b"answer")
reap(pid)
equal(os.stat(NAME).st_mode & 0o777, 0o600, "mode of the socket's name")
passed()
