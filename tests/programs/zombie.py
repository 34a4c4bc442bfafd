"""Children that have ended and were not waited for: their exit codes can be fetched afterwards."""

import os
import signal
import time

from harness import equal, passed, process_state, reap, start, wait

start()
exited = os.fork()
if exited == 0:
    os._exit(7)
killed = os.fork()
if killed == 0:
    time.sleep(1000)
os.kill(killed, signal.SIGKILL)
for pid in (exited, killed):
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

wait()

equal([process_state(p) for p in (exited, killed)], ["Z", "Z"], "states")
reap(exited, 7)
reap(killed, -signal.SIGKILL)
try:
    equal(os.waitpid(-1, os.WNOHANG), None, "a child too many")
except ChildProcessError:
    pass
passed()
