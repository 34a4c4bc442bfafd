"""A unix seqpacket pair between parent and child: queued packets keep order and bounds, later use. One that listens, and
one that is not connected yet."""

import socket

from harness import await_go, child, equal, passed, reap, start, wait

PACKETS = [b"a", b"bb" * 500, b"ccc"]
start()
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
ours.settimeout(20)
listener, client = (socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2))
listener.bind("listener")
listener.listen()


def serve():
    ours.close()
    await_go()
    for packet in PACKETS:
        equal(theirs.recv(5000), packet, "packet queued down")
    theirs.send(theirs.recv(100).upper())


pid = child(serve)
for packet in PACKETS:
    ours.send(packet)
theirs.send(b"queued")
theirs.close()

wait()

equal(ours.recv(100), b"queued", "packet queued up")
ours.send(b"later")
equal(ours.recv(100), b"LATER", "echo")
reap(pid)
equal(ours.recv(100), b"", "end of the pair")
client.connect("listener")
client.send(b"hello")
equal(listener.accept()[0].recv(100), b"hello", "packet to the listener")
passed()
