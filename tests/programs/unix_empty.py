"""Unix messages of length zero (datagrams, seqpacket) at the start, between others and at the end of a queue: all are received in order."""

import os
import socket

from harness import await_go, child, equal, passed, reap, start, wait

QUEUES = [
    [b"", b"after", b"", b"", b"x" * 5000, b""],
    [b"before", b""],
    [b"", b""],
    [b""],
]
KINDS = (socket.SOCK_DGRAM, socket.SOCK_SEQPACKET)


def check(sock, messages, what):
    sock.settimeout(20)
    for number, message in enumerate(messages):
        equal(sock.recv(6000), message, f"message {number} {what}")
    sock.setblocking(False)
    try:
        equal(sock.recv(100), b"", f"end of the queue {what}")
        equal(sock.type, socket.SOCK_SEQPACKET, f"socket that ends {what}")
    except BlockingIOError:
        pass


def pairs(kind):
    return [(*socket.socketpair(socket.AF_UNIX, kind), messages) for messages in QUEUES]


start()
between = {kind: pairs(kind) for kind in KINDS}
within = {kind: pairs(kind) for kind in KINDS}
without_sender = {kind: pairs(kind) for kind in KINDS}


def serve():
    await_go()
    for kind, some in between.items():
        for _, theirs, messages in some:
            check(theirs, messages, f"between processes ({kind.name})")


pid = child(serve)
path = os.path.join(os.getcwd(), "empty.sock")
server = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
server.bind(path)
client = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
client.connect(path)
for message in QUEUES[0]:
    client.send(message)
for some in (between, within, without_sender):
    for left, _, messages in sum(some.values(), []):
        for message in messages:
            left.send(message)
        if some is without_sender:
            left.close()

wait()

check(server, QUEUES[0], "at the named socket")
for kind in KINDS:
    for left, right, messages in within[kind]:
        check(right, messages, f"in the pair ({kind.name})")
        left.send(b"")
        left.send(b"later")
        check(right, [b"", b"later"], f"in the pair later ({kind.name})")
    for _, right, messages in without_sender[kind]:
        check(right, messages, f"of a closed socket ({kind.name})")
reap(pid)
passed()
