"""Messages from node 1 to node 0, each with a connection of its own, which is closed as soon as the message is sent.

Arguments: node rank, address of node 0, port, number of messages. Node 0 appends a line for each message to messages.txt and
checks it. The file `slow` has node 0 not read, so that the kernel of node 1 keeps a message that its process has sent, and node 1
send no more.
"""

import hashlib
import os
import socket
import sys
import time

RANK, HOST, PORT, MESSAGES = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
BYTES = 128 * 1024
# Far less than a message.
RECEIVE_BUFFER_BYTES = 8 * 1024


def message(number):
    seed = hashlib.sha256(f"{number}".encode()).digest()
    return seed * (BYTES // len(seed))


def log(line):
    with open("messages.txt", "a") as out:
        out.write(line + "\n")


def receive():
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
    listener.bind((HOST, PORT))
    listener.listen()
    for number in range(MESSAGES):
        stream = listener.accept()[0]
        while os.path.exists("slow"):
            time.sleep(0.05)
        data = bytearray()
        while part := stream.recv(65536):
            data += part
        stream.close()
        if data != message(number):
            sys.exit(f"message {number} has {len(data)} bytes, or is another one")
        log(f"{number} received")


def connect():
    while True:
        stream = socket.socket()
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * BYTES)
        try:
            stream.connect((HOST, PORT))
            return stream
        except OSError:
            time.sleep(0.05)


def send():
    for number in range(MESSAGES):
        stream = connect()
        stream.sendall(message(number))
        stream.close()
        log(f"{number} sent")
        while os.path.exists("slow"):
            time.sleep(0.05)


receive() if RANK == 0 else send()
