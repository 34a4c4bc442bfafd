"""Unix datagram sockets, a pair and named ones: queued messages keep their bounds, names are reachable."""

import os
import socket

from harness import equal, passed, start, wait

start()


def dgram(name=None):
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sock.settimeout(20)
    if name:
        sock.bind(name)
    return sock


left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
right.settimeout(20)
path = os.path.join(os.getcwd(), "dgram.sock")
server, client = dgram(path), dgram("\0ckpt-" + path)
client.connect(path)
for message in (b"one", b"two" * 1000, b"three"):
    left.send(message)
    client.send(b"named " + message)

wait()

for message in (b"one", b"two" * 1000, b"three"):
    equal(right.recv(5000), message, "message queued in the pair")
    data, sender = server.recvfrom(5000)
    equal(data, b"named " + message, "message queued at the named socket")
    equal(sender, b"\0ckpt-" + path.encode(), "sender of the queued message")
left.send(b"later")
equal(right.recv(100), b"later", "message in the pair")
client.send(b"later")
data, sender = server.recvfrom(100)
server.sendto(data.upper(), sender)
equal(client.recv(100), b"LATER", "answer by the abstract name")
dgram().sendto(b"new", path)
equal(server.recv(100), b"new", "message from a new socket")
passed()
