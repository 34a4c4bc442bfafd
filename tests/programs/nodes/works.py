"""Works on its own on each machine: uses the CPU for a while in each step, and appends a line to steps.txt.

Arguments: the number of steps. Once the file `hang` is there, the next step never ends; a process that was restored from a
snapshot in that step is still in it. While the file `stop-here` is there, the process waits before a step, and does nothing.
On SIGTERM it writes `saved` and exits with 3. The file `slow` slows it down.
"""

import os
import signal
import sys
import time


def ended(*_):
    with open("saved", "w"):
        pass
    os._exit(3)


signal.signal(signal.SIGTERM, ended)
with open("steps.txt", "a", buffering=1) as log:
    for step in range(int(sys.argv[1])):
        end = time.process_time() + 0.01
        while time.process_time() < end:
            pass
        while os.path.exists("stop-here"):
            time.sleep(0.05)
        if os.path.exists("hang"):
            while True:
                time.sleep(1000)
        log.write(f"{step}\n")
        if os.path.exists("slow"):
            time.sleep(0.05)
