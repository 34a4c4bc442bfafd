"""UDP on loopback: addresses and connection kept, datagrams go both ways (queued ones may be lost)."""

import socket

from harness import await_go, child, equal, passed, reap, start, wait

start()


def bound():
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind(("127.0.0.1", 0))
    sock.settimeout(20)
    return sock


server, client = bound(), bound()
client.connect(server.getsockname())
client.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
names = server.getsockname(), client.getsockname()


def echo():
    client.close()
    data, sender = server.recvfrom(100)
    server.sendto(data.upper(), sender)
    await_go()
    data, sender = server.recvfrom(100)
    equal(sender, names[1], "sender")
    server.sendto(data.upper(), sender)


pid = child(echo)
client.send(b"before")
equal(client.recv(100), b"BEFORE", "echo before")

wait()

equal((server.getsockname(), client.getsockname()), names, "addresses")
equal(client.getpeername(), names[0], "peer")
equal(client.getsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST), 1, "SO_BROADCAST")
client.send(b"later")
equal(client.recv(100), b"LATER", "echo")
reap(pid)
passed()
