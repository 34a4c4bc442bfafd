"""Anonymous shared memory of parent and child: content of the snapshot, later changes seen by both."""

import mmap

from harness import await_go, check, child, equal, passed, reap, start, until, wait

TICKS = 1 << 16
start()
shared = mmap.mmap(-1, 1 << 20)
shared[-5:] = b"state"
ticks = 0


def tick():
    global ticks
    shared[ticks] = 1
    ticks += 1


def other_side():
    await_go()
    until(lambda: shared[-6:] == b"parent", "the parent's change")
    equal(shared[TICKS : TICKS + 5], b"state", "content seen by the child")
    shared[-5:] = b"child"


pid = child(other_side)

wait(tick)

equal(shared[-5:], b"state", "content")
marks = shared[:TICKS].count(1)
check(marks == ticks, f"{marks} marks in shared memory, {ticks} made by this run of the job")
shared[TICKS : TICKS + 5] = b"state"
shared[-6:] = b"parent"
reap(pid)
equal(shared[-5:], b"child", "content after the child's write")
passed()
