"""TCP inside the tree: data in flight each way, options, an idle connection, a listener that accepts later."""

import socket

from harness import await_go, child, equal, passed, reap, start, unavailable, wait

DOWN, UP = b"d" * 100_000, b"u" * 50_000


def receive(sock, n):
    data = b""
    while len(data) < n and (part := sock.recv(n - len(data))):
        data += part
    return data


def main(family, address, reuse=1):
    start()
    server = socket.socket(family)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
    try:
        server.bind((address, 0))
    except OSError as e:
        unavailable(f"{address}: {e}")
    server.listen(5)
    server.settimeout(20)
    port = server.getsockname()[1]
    pid = child(client, family, address, port, server)
    server.accept()[0].close()  # the first to close: TIME_WAIT stays on the listener's port
    conn, idle = server.accept()[0], server.accept()[0]
    for sock in (conn, idle):
        sock.settimeout(20)
    conn.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    conn.sendall(DOWN)
    equal(conn.recv(1), b"u", "first byte from the child")

    wait()

    equal(receive(conn, len(UP) - 1), UP[1:], "data in flight up")
    conn.send(b"later")
    equal(receive(conn, 5), b"LATER", "echo")
    equal(conn.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY), 1, "TCP_NODELAY")
    equal(conn.getsockname()[1], port, "port")
    idle.send(b"wake up")
    new, _ = server.accept()
    equal(receive(new, 3), b"new", "data of a new client")
    new.close()
    conn.shutdown(socket.SHUT_WR)
    equal(conn.recv(1), b"", "end of the connection")
    reap(pid)
    passed()


def client(family, address, port, server):
    server.close()
    equal(socket.create_connection((address, port), 20).recv(1), b"", "end of the first connection")
    conn = socket.create_connection((address, port), 20)
    conn.sendall(UP)
    idle = socket.create_connection((address, port), 20)
    await_go()
    equal(receive(conn, len(DOWN)), DOWN, "data in flight down")
    conn.sendall(receive(conn, 5).upper())
    equal(receive(idle, 7), b"wake up", "data on the idle connection")
    new = socket.create_connection((address, port), 20)
    new.send(b"new")
    equal(new.recv(1), b"", "end of the new connection")
    equal(conn.recv(1), b"", "end of the connection")


if __name__ == "__main__":
    main(socket.AF_INET, "127.0.0.1")
