"""A process tree 5 levels deep and 3 wide: PIDs, parents and depths are as before, and all end with 0."""

import os

from harness import await_go, child, equal, passed, reap, start, wait

DEPTH, WIDTH = 5, 3
start()
r, w = os.pipe()


def report(level):
    os.write(w, f"{level} {os.getpid()} {os.getppid()}\n".encode())


def node(level):
    """Reports itself; of the children only the first has children of its own."""
    report(level)
    pids = [child(leaf if n else node, level + 1) for n in range(WIDTH if level < DEPTH else 0)]
    await_go()
    report(level)
    for pid in pids:
        reap(pid)


def leaf(level):
    report(level)
    await_go()
    report(level)


def reports(n):
    text = b""
    while text.count(b"\n") < n:
        text += os.read(r, 4096)
    return sorted(text.split(b"\n"))


top = child(node, 1)
count = 1 + (DEPTH - 1) * WIDTH
before = reports(count)

wait()

equal(reports(count), before, "levels, PIDs and parents")
reap(top)
passed()
