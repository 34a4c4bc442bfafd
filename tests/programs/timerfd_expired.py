"""A periodic timer descriptor that has fired and was not read at the snapshot ticks on afterwards."""

import os
import select
import struct

from harness import check, passed, start, wait
from linux import call, timerspec

CLOCK_MONOTONIC = 1
start()
fd = call("timerfd_create", CLOCK_MONOTONIC, os.O_NONBLOCK)
call("timerfd_settime", fd, 0, timerspec(0.05, 0.05), None)
check(select.select([fd], [], [], 10)[0], "the timer does not fire")

wait()

for _ in range(3):
    check(select.select([fd], [], [], 10)[0], "the periodic timer has stopped")
    check(struct.unpack("Q", os.read(fd, 8))[0] >= 1, "no expiration")
passed()
