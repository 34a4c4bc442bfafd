"""A daemon (double fork, own session), no child of the program any more, still answers with its state."""

import os
import socket

from harness import check, child, equal, passed, reap, start, wait

start()


def serve():
    """Counts requests; ends at `quit`."""
    server = socket.socket(socket.AF_UNIX)
    server.bind("daemon.sock")
    server.listen(5)
    os.write(w, b"up")
    count = 0
    while True:
        conn, _ = server.accept()
        request = conn.recv(100)
        count += 1
        conn.send(f"{count} {os.getpid()} {os.getsid(0)}".encode())
        conn.close()
        if request == b"quit":
            return


def daemonise():
    os.setsid()
    if os.fork() == 0:
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        serve()


def ask(request):
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(20)
    sock.connect("daemon.sock")
    sock.send(request)
    return [int(word) for word in sock.recv(100).split()]


r, w = os.pipe()
null = os.open("/dev/null", os.O_RDWR)
reap(child(daemonise))
equal(os.read(r, 2), b"up", "start of the daemon")
first, pid, session = ask(b"hello")

wait()

equal(ask(b"hello"), [first + 1, pid, session], "count, PID and session of the daemon")
check(os.getsid(0) != session, "the daemon is in the program's session")
equal(ask(b"quit"), [first + 2, pid, session], "last answer of the daemon")
passed()
