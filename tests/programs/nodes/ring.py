"""A ring of TCP connections between machines: each node sends to the next one and receives from the one before.

Arguments: node rank, number of rounds, port, the addresses of all nodes. In each round a node sends its state with much
data, and makes its next state from its own and the received one: all states depend on all before. Each round is a line of
rounds.txt. The file `slow` slows a node down.

`expect RANK ROUNDS NODES` as arguments: prints what rounds.txt of a node has to hold.
"""

import hashlib
import os
import socket
import sys
import threading
import time

BYTES = 64 * 1024


def first(rank):
    return hashlib.sha256(f"node {rank}".encode()).digest()


def mixed(own, received):
    return hashlib.sha256(own + received).digest()


def expect(rank, rounds, nodes):
    states = [first(node) for node in range(nodes)]
    for number in range(rounds):
        states = [mixed(states[node], states[node - 1]) for node in range(nodes)]
        print(number, states[rank].hex())


def connect(address):
    while True:
        try:
            return socket.create_connection(address, timeout=5)
        except OSError:
            time.sleep(0.05)


def read(stream):
    data = bytearray()
    while len(data) < BYTES:
        part = stream.recv(BYTES - len(data))
        if not part:
            sys.exit("the connection has ended")
        data += part
    return bytes(data)


def run(rank, rounds, port, hosts):
    listener = socket.create_server((hosts[rank], port))
    accepted = []
    accepting = threading.Thread(target=lambda: accepted.append(listener.accept()[0]))
    accepting.start()
    to = connect((hosts[(rank + 1) % len(hosts)], port))
    to.settimeout(None)
    accepting.join()
    listener.close()
    before, state = accepted[0], first(rank)
    with open("rounds.txt", "a") as out:
        for number in range(rounds):
            sending = threading.Thread(target=to.sendall, args=[state * (BYTES // len(state))])
            sending.start()
            data = read(before)
            sending.join()
            received = data[: len(state)]
            if data != received * (BYTES // len(state)):
                sys.exit(f"round {number}: not what was sent")
            state = mixed(state, received)
            out.write(f"{number} {state.hex()}\n")
            out.flush()
            if os.path.exists("slow"):
                time.sleep(0.1)
    # The next node may still read.
    to.shutdown(socket.SHUT_WR)
    while before.recv(1):
        pass


if sys.argv[1] == "expect":
    expect(*map(int, sys.argv[2:5]))
else:
    run(*map(int, sys.argv[1:4]), sys.argv[4:])
