"""A descriptor of a child process (pidfd): signals and polling work afterwards."""

import os
import select
import signal
import time

from harness import check, child, equal, passed, start, wait

start()
pid = child(time.sleep, 1000)
fd = os.pidfd_open(pid)
other = child(time.sleep, 1000)
other_fd = os.pidfd_open(other)

wait()

signal.pidfd_send_signal(fd, 0)
check(not select.select([fd], [], [], 0)[0], "the descriptor says that the child has ended")
signal.pidfd_send_signal(fd, signal.SIGTERM)
check(select.select([fd], [], [], 10)[0], "the descriptor does not tell the child's end")
status = os.waitid(os.P_PIDFD, fd, os.WEXITED)
equal((status.si_pid, status.si_status), (pid, signal.SIGTERM), "child that ended and its signal")
check(not select.select([other_fd], [], [], 0)[0], "the other child has ended")
os.kill(other, signal.SIGKILL)
equal(os.waitid(os.P_PIDFD, other_fd, os.WEXITED).si_pid, other, "the other child")
passed()
