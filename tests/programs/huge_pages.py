"""Memory in transparent huge pages has them again soon after a resume, long before the kernel's own thread gets to it."""

import ctypes
import mmap

from harness import equal, passed, start, unavailable, until, wait

SIZE = 128 << 20
# The kernel's own thread looks at 16 MiB in 10 s.
CAP_S = 30


def huge_kib():
    """How much of the mapping is in huge pages, from smaps."""
    address, found, is_inside = ctypes.addressof(ctypes.c_char.from_buffer(memory)), 0, False
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            fields = line.split()
            if "-" in fields[0]:
                begin, end = (int(part, 16) for part in fields[0].split("-"))
                is_inside = begin < address + SIZE and address < end
            elif is_inside and fields[0] == "AnonHugePages:":
                found += int(fields[1])
    return found


start()
memory = mmap.mmap(-1, SIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(mmap.MADV_HUGEPAGE)
content = bytes(range(256)) * (SIZE // 256)
memory[:] = content
before = huge_kib()
if before < SIZE // 2048:
    unavailable("the kernel gives no huge pages")

wait()

until(lambda: huge_kib() >= before // 2, "huge pages", CAP_S)
equal(memory[:] == content, True, "content")
passed()
