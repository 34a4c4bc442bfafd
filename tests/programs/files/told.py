"""Executes Python code that a test puts into DIR, one file after another: `0.py`, `1.py`, and so on.

usage: told.py DIR

Prints `done N` after each. All code has the same variables, which are the memory of this job.
"""

import os
import sys
import time

variables = {}
done = 0
while True:
    path = os.path.join(sys.argv[1], f"{done}.py")
    if os.path.exists(path):
        with open(path) as file:
            exec(file.read(), variables)
        print("done", done, flush=True)
        done += 1
    else:
        time.sleep(0.005)
