"""Inotify watches on a directory and a file: numbers and masks kept, events arrive afterwards."""

import os
import struct

from harness import check, equal, passed, start, wait
from linux import call

IN_MODIFY, IN_CREATE, IN_DELETE = 0x2, 0x100, 0x200


def events():
    """All queued events as (watch, mask, name)."""
    raw, found = os.read(fd, 4096), []
    while raw:
        watch, mask, _, length = struct.unpack_from("iIII", raw)
        found.append((watch, mask, raw[16 : 16 + length].rstrip(b"\0")))
        raw = raw[16 + length :]
    return found


start()
os.mkdir("dir")
with open("file", "w"):
    pass
fd = call("inotify_init1", os.O_NONBLOCK)
unused = call("inotify_add_watch", fd, b"/", IN_CREATE)
in_dir = call("inotify_add_watch", fd, b"dir", IN_CREATE | IN_DELETE)
in_file = call("inotify_add_watch", fd, b"file", IN_MODIFY)
call("inotify_rm_watch", fd, unused)
os.mkdir("dir/early")
check((in_dir, IN_CREATE, b"early") in [(w, m & 0xFFF, n) for w, m, n in events()], "no event before")

wait()

os.mkdir("dir/later")
with open("file", "w") as f:
    f.write("text")
found = [(w, m & 0xFFF, n) for w, m, n in events()]
check((in_dir, IN_CREATE, b"later") in found, f"no event of the directory: {found}")
check((in_file, IN_MODIFY, b"") in found, f"no event of the file: {found}")
call("inotify_rm_watch", fd, in_dir)
events()
os.rmdir("dir/later")
try:
    equal(events(), [], "events of a removed watch")
except BlockingIOError:
    pass
passed()
