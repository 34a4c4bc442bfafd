"""Named shared memory (linked in /dev/shm): a resume brings back its content of the snapshot."""

from multiprocessing.shared_memory import SharedMemory

from harness import check, child, equal, passed, reap, start, wait

TICKS = 1 << 16
start()
shm = SharedMemory(create=True, size=1 << 20)
shm.buf[TICKS : TICKS + 5] = b"state"
ticks = 0


def tick():
    """Marks one more byte; the count itself is in private memory, which is always rolled back."""
    global ticks
    shm.buf[ticks] = 1
    ticks += 1


def other_side():
    other = SharedMemory(shm.name)
    equal(bytes(other.buf[TICKS : TICKS + 5]), b"state", "content seen by name")
    other.buf[TICKS : TICKS + 5] = b"child"
    other.close()


wait(tick)

marks = bytes(shm.buf[:TICKS]).count(1)
check(marks == ticks, f"{marks} marks in shared memory, {ticks} made by this run of the job")
equal(bytes(shm.buf[TICKS : TICKS + 5]), b"state", "content")
reap(child(other_side))
equal(bytes(shm.buf[TICKS : TICKS + 5]), b"child", "content after the child's write")
shm.close()
shm.unlink()
passed()
