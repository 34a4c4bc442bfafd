"""A performance counter (perf_event_open) that counts this task's time on the CPU."""

import os
import struct

import _path  # noqa: F401
from harness import check, passed, start, unavailable, wait
from linux import call

SYS_PERF_EVENT_OPEN, PERF_TYPE_SOFTWARE, PERF_COUNT_SW_TASK_CLOCK = 298, 1, 1
EXCLUDE_KERNEL, FD_CLOEXEC = 1 << 5, 8

start()
attributes = struct.pack(
    "IIQQQQQ", PERF_TYPE_SOFTWARE, 128, PERF_COUNT_SW_TASK_CLOCK, 0, 0, 0, EXCLUDE_KERNEL
)
try:
    fd = call("syscall", SYS_PERF_EVENT_OPEN, attributes.ljust(128, b"\0"), 0, -1, -1, FD_CLOEXEC)
except OSError as e:
    unavailable(e)
before = struct.unpack("Q", os.read(fd, 8))[0]

wait()

check(struct.unpack("Q", os.read(fd, 8))[0] > before, "the counter has stopped")
passed()
