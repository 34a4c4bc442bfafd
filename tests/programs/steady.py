"""Computes a chain of hashes together with a child process, for as many steps as its argument says.

Its state is in both processes, in the pipes between them, and in files: `chain` is appended to, `state` is
overwritten in place, `newest` is replaced by renaming. The standard output has each tenth step.
"""

import hashlib
import os
import sys
import time

STEPS = int(sys.argv[1])
PAUSE_S = 0.004


def serve(requests, answers):
    """Answers each link with one that depends on all before it."""
    memory = bytearray(1 << 20)
    state = hashlib.sha256()
    while link := os.read(requests, 32):
        state.update(link)
        at = int.from_bytes(link[:2], "big") * 16
        memory[at : at + 32] = state.digest()
        os.write(answers, hashlib.sha256(memory[at - 64 : at + 64] + state.digest()).digest())
    os._exit(0)


request_r, request_w = os.pipe()
answer_r, answer_w = os.pipe()
child = os.fork()
if child == 0:
    os.close(request_w)
    os.close(answer_r)
    serve(request_r, answer_w)
os.close(request_r)
os.close(answer_w)

link = bytes(32)
state = open("state", "wb", buffering=0)
with open("chain", "a") as chain:
    for step in range(STEPS):
        os.write(request_w, link)
        link = os.read(answer_r, 32)
        line = f"{step} {link.hex()}"
        print(line, file=chain, flush=True)
        state.seek(step % 64 * 128)
        state.write(line.encode())
        if step % 10 == 0:
            print(line, flush=True)
            with open("newest.new", "w") as newest:
                newest.write(line)
            os.rename("newest.new", "newest")
        time.sleep(PAUSE_S)
os.close(request_w)
os.waitpid(child, 0)
