"""What the benchmark saves: so many bytes of memory in so many processes, and a heartbeat of the first one that shows for how
long it stood still.

In the working directory: `ready` (memory is filled), `reset` (start measuring: removed when seen), `report` (write the
longest gap between heartbeats, in seconds, to `gap`), `ping` (answer with `pong`), `change-all`, `change-dense`,
`change-scattered` (change all memory, or one page of 20, side by side or apart; then answer with `changed`),
`rewrite-dense`, `rewrite-scattered` (from now on, change a twentieth again and again; answer with `rewriting`).
"""

import os
import random
import sys
import threading
import time

processes = int(sys.argv[2])
size = int(sys.argv[1]) // processes
filled, is_filled = os.pipe()
is_first = all(os.fork() for _ in range(1, processes))
block = os.urandom(1 << 20)
memory = bytearray(size)
for at in range(0, size, len(block)):
    memory[at : at + len(block)] = block[: size - at]


PAGE = 4096


def change(what):
    """All of the memory is different afterwards, or a twentieth of its pages."""
    if what == "scattered":
        for at in range(0, size - PAGE, 20 * PAGE):
            memory[at : at + 8] = random.randbytes(8)
        return
    begin, end = (0, size) if what == "all" else (size // 2, size // 2 + size // 20)
    for at in range(begin, end, len(block)):
        length = min(len(block), end - at)
        memory[at : at + length] = random.randbytes(length)


def rewrite(what):
    """Changes the same twentieth of the pages again and again."""
    while True:
        value = random.randbytes(8)
        if what == "scattered":
            for at in range(0, size - PAGE, 20 * PAGE):
                memory[at : at + 8] = value
        else:
            for at in range(size // 2, size // 2 + size // 20, PAGE):
                memory[at : at + 8] = value
        time.sleep(0.02)


def answer(question, reply, text=""):
    if not os.path.exists(question):
        return False
    os.unlink(question)
    with open(reply + ".tmp", "w") as f:
        f.write(text)
    os.rename(reply + ".tmp", reply)
    return True


if not is_first:
    os.write(is_filled, b"1")
    while True:
        time.sleep(1000)
for _ in range(1, processes):
    os.read(filled, 1)
open("ready.tmp", "w").close()
os.rename("ready.tmp", "ready")
last, longest = time.monotonic(), 0.0
while True:
    now = time.monotonic()
    longest, last = max(longest, now - last), now
    if answer("reset", "reset-done"):
        longest, last = 0.0, time.monotonic()
    answer("report", "gap", repr(longest))
    answer("ping", "pong")
    for what in ("dense", "scattered"):
        if os.path.exists("rewrite-" + what):
            threading.Thread(target=rewrite, args=(what,), daemon=True).start()
            answer("rewrite-" + what, "rewriting")
    for what in ("all", "dense", "scattered"):
        if os.path.exists("change-" + what):
            change(what)
            answer("change-" + what, "changed")
    time.sleep(0.0005)
