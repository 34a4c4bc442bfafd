"""Private memory of each kind: with all accesses and with less, with holes, only read, shared with a forked process, and
allocated or given back while the program waits.
"""

import ctypes
import mmap
import os
import random
import signal

from harness import await_go, check, child, equal, passed, reap, start, wait

PAGE = 4096
SIZE = 4 << 20
GUARD = 100
PROT_NONE, PROT_READ, PROT_WRITE = 0, 1, 2
PR_SET_VMA, PR_SET_VMA_ANON_NAME = 0x53564D41, 0

libc = ctypes.CDLL(None, use_errno=True)


def address(memory):
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def protect(memory, protection):
    result = libc.mprotect(ctypes.c_void_p(address(memory)), ctypes.c_size_t(len(memory)), protection)
    equal(result, 0, "mprotect")


def mapped(size=SIZE, advice=None):
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if advice is not None:
        memory.madvise(advice)
    return memory


def filled(seed, **how):
    """Memory whose content is known by its seed."""
    memory = mapped(**how)
    memory[:] = random.Random(seed).randbytes(len(memory))
    return memory


def shared_kib(memory):
    """How much another process has, too, of the mapping that has this memory, and of what the kernel has merged with it."""
    place, found, is_inside = address(memory), 0, False
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            fields = line.split()
            if "-" in fields[0]:
                begin, end = (int(part, 16) for part in fields[0].split("-"))
                is_inside = begin <= place < end
            elif is_inside and fields[0] in ("Shared_Clean:", "Shared_Dirty:"):
                found += int(fields[1])
    return found


def verify(memory, seed, what):
    equal(memory[:] == random.Random(seed).randbytes(len(memory)), True, what)


start()
plain = filled(1)
only_read = filled(2)
no_access = filled(3)
only_written = filled(4)
huge = filled(5, advice=mmap.MADV_HUGEPAGE)
named = filled(6)
libc.prctl(
    PR_SET_VMA,
    ctypes.c_ulong(PR_SET_VMA_ANON_NAME),
    ctypes.c_ulong(address(named)),
    ctypes.c_ulong(SIZE),
    b"a name",
)
# Every third page is written, and the one behind it is only read.
holes = mapped()
for page in range(0, SIZE // PAGE, 3):
    holes[page * PAGE] = page % 251 + 1
    if page + 1 < SIZE // PAGE:
        equal(holes[(page + 1) * PAGE], 0, "a new page")
zeros = mapped(16 << 20)
equal(zeros[:] == bytes(len(zeros)), True, "new memory")
inherited = filled(7)
common = filled(10, advice=mmap.MADV_NOHUGEPAGE)
# A page in the middle that nobody may touch (MADV_GUARD_INSTALL, Linux 6.13).
guarded = filled(11)
has_guard = libc.madvise(ctypes.c_void_p(address(guarded) + GUARD * PAGE), ctypes.c_size_t(PAGE), 102) == 0
protect(only_read, PROT_READ)
protect(no_access, PROT_NONE)
protect(only_written, PROT_WRITE)
growing, shrinking = [], [filled(seed) for seed in range(100, 108)]


def child_side():
    inherited[: SIZE // 2] = random.Random(8).randbytes(SIZE // 2)
    await_go()
    verify(inherited[SIZE // 2 :], 9, "the half that both have")
    equal(inherited[: SIZE // 2] == random.Random(8).randbytes(SIZE // 2), True, "the half of the child")
    check(shared_kib(common) >= SIZE // 1024, f"{shared_kib(common)} KiB are shared, which nobody has written to")


inherited[SIZE // 2 :] = random.Random(9).randbytes(SIZE // 2)
pid = child(child_side)
# At addresses that the child does not have.
own = filled(12, size=4 * SIZE)
ticks = 0


def tick():
    global ticks
    ticks += 1
    if ticks % 20 == 0 and len(growing) < 8:
        growing.append(filled(200 + len(growing)))
        shrinking.pop().close()


wait(tick)

verify(plain, 1, "memory")
for memory, seed, what in [(only_read, 2, "only read"), (no_access, 3, "no access"), (only_written, 4, "only written")]:
    protect(memory, PROT_READ | PROT_WRITE)
    verify(memory, seed, what)
verify(huge, 5, "huge pages")
verify(named, 6, "memory with a name")
for page in range(SIZE // PAGE):
    expected = page % 251 + 1 if page % 3 == 0 else 0
    equal(holes[page * PAGE], expected, f"page {page} of memory with holes")
equal(zeros[:] == bytes(len(zeros)), True, "zeros")
verify(own, 12, "memory of one process alone")
verify(common, 10, "memory that a forked process has, too")
if has_guard:
    toucher = os.fork()
    if toucher == 0:
        os._exit(guarded[GUARD * PAGE] * 0)
    equal(os.waitstatus_to_exitcode(os.waitpid(toucher, 0)[1]), -signal.SIGSEGV, "who touches the guard")
for number, memory in enumerate(growing):
    verify(memory, 200 + number, "new memory")
for seed, memory in zip(range(100, 108), shrinking):
    verify(memory, seed, "old memory")
reap(pid)
passed()
