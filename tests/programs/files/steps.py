"""Writes files of its own name beside those of another job: a log that is opened for each line, a state that is replaced,
and a new file every tenth step. Stops half way until there is the file `go` in the parent directory.

usage: steps.py NAME STEPS
"""

import os
import sys
import time

name, steps = sys.argv[1], int(sys.argv[2])
for step in range(steps):
    while step == steps // 2 and not os.path.exists("../go"):
        time.sleep(0.01)
    with open(f"{name}.log", "a") as log:
        log.write(f"{step}\n")
    with open(f"{name}.new", "w") as state:
        state.write(str(step))
    os.rename(f"{name}.new", f"{name}.state")
    if step % 10 == 0:
        # A file that is there already is an error.
        with open(f"{name}-{step}", "x") as made:
            made.write(str(step))
    time.sleep(0.01)
