"""A directory that is open and deleted, or that of a deleted file: something else has its name now.

usage: deleted_directory.py open|cwd|of-a-file
"""

import os
import sys

import _path  # noqa: F401
from harness import equal, passed, start, wait

start()
kind, top = sys.argv[1], os.getcwd()
os.mkdir("place")
held = os.open("place", os.O_RDONLY | os.O_DIRECTORY)
if kind == "of-a-file":
    os.close(held)
    held = os.open("place/file", os.O_RDWR | os.O_CREAT)
    os.unlink("place/file")
if kind == "cwd":
    os.close(held)
    os.chdir("place")
os.rmdir(os.path.join(top, "place"))
if kind == "of-a-file":
    os.close(os.open("place", os.O_WRONLY | os.O_CREAT))
else:
    os.mkdir(os.path.join(top, "place"))

wait()

equal(os.path.exists(os.path.join(top, "place")), True, "the name is still there")
equal(os.stat("." if kind == "cwd" else held).st_nlink, 0, "names of the deleted one")
passed()
