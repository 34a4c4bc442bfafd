"""A temporary file that is open for writing at the snapshot and removed after it: after a resume it is there again."""

import os
import shutil
import tempfile

from harness import equal, passed, start, wait

start()
directory = tempfile.mkdtemp()
path = os.path.join(directory, "scratch")
file = open(path, "w+")
file.write("before")
file.flush()
os.chmod(path, 0o640)


def tick():
    """After the snapshot, but before the kill, it is removed with its directory."""
    if os.path.exists("saved"):
        shutil.rmtree(directory, ignore_errors=True)


wait(tick)

file.write(" and after")
file.flush()
with open(path) as again:
    equal(again.read(), "before and after", "content by name")
equal(os.stat(path).st_mode & 0o7777, 0o640, "mode")
shutil.rmtree(directory)
passed()
