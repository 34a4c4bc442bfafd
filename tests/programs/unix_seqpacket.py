"""A unix seqpacket pair between parent and child: queued packets keep order and bounds, later use."""

import socket

from harness import await_go, child, equal, passed, reap, start, wait

PACKETS = [b"a", b"bb" * 500, b"ccc"]
start()
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
ours.settimeout(20)


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
passed()
