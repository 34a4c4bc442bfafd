"""A connection from port 15874 to port 15873, which nobody listens on any more.

`pair.py job` writes `ready`, sends one byte after another until there is `go`, and prints how it went. `pair.py take` prints
`taken`, and keeps the connection until its standard input ends. Nothing is left of the connection in the kernel afterwards.
"""

import os
import socket
import struct
import sys
import time

PORTS = ("127.0.0.1", 15873), ("127.0.0.1", 15874)

listening, client = socket.socket(), socket.socket()
for one, address in zip((listening, client), PORTS):
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    one.bind(address)
listening.listen()
client.connect(PORTS[0])
server, _ = listening.accept()
listening.close()
for one in (client, server):
    # Closed, it is reset.
    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
if sys.argv[1] == "take":
    print("taken", flush=True)
    sys.stdin.read()
else:
    open("ready", "w").close()
    while not os.path.exists("go"):
        client.sendall(b"x")
        assert server.recv(1) == b"x"
        time.sleep(0.02)
    print("connected")
