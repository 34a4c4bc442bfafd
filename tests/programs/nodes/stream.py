"""One end of a TCP connection between two machines, with much data under way in both directions all the time.

Arguments: node rank, address of node 0, port, number of blocks. Each end sends blocks that depend on its rank and their
number only, checks each block of the other end, and appends a line for it to blocks.txt. The file `slow` slows both down.
"""

import hashlib
import os
import socket
import sys
import threading
import time

RANK, HOST, PORT, BLOCKS = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
BYTES = 96 * 1024


def block(rank, number):
    seed = hashlib.sha256(f"{rank} {number}".encode()).digest()
    return seed * (BYTES // len(seed))


def connect():
    if RANK == 0:
        listener = socket.create_server((HOST, PORT))
        return listener.accept()[0]
    while True:
        try:
            return socket.create_connection((HOST, PORT))
        except OSError:
            time.sleep(0.05)


def send(stream):
    for number in range(BLOCKS):
        stream.sendall(block(RANK, number))


def receive(stream):
    with open("blocks.txt", "a") as out:
        for number in range(BLOCKS):
            data = bytearray()
            while len(data) < BYTES:
                part = stream.recv(BYTES - len(data))
                if not part:
                    sys.exit(f"the connection ended at block {number}")
                data += part
            if data != block(1 - RANK, number):
                sys.exit(f"block {number} is not the one that was sent")
            out.write(f"{number} {hashlib.sha256(data).hexdigest()}\n")
            out.flush()
            if os.path.exists("slow"):
                time.sleep(0.1)


stream = connect()
sender = threading.Thread(target=send, args=[stream])
sender.start()
receive(stream)
sender.join()
# The other end may still read.
stream.shutdown(socket.SHUT_WR)
while stream.recv(1):
    pass
