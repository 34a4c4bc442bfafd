"""Open files without their name: deleted, or replaced by a new file; data and offset kept."""

import os

from harness import equal, passed, start, wait

start()


def create(name, text):
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o640)
    os.write(fd, text)
    os.lseek(fd, 4, os.SEEK_SET)
    return fd


deleted = create("deleted", b"0123 deleted" * 1000)
os.unlink("deleted")
replaced = create("replaced", b"0123 replaced")
os.unlink("replaced")
with open("replaced", "w") as f:
    f.write("the new file")
os.mkdir("dir")
in_dir = create("dir/file", b"0123 in a directory")
os.unlink("dir/file")

wait()

for fd, text in (
    (deleted, b"0123 deleted" * 1000),
    (replaced, b"0123 replaced"),
    (in_dir, b"0123 in a directory"),
):
    equal(os.read(fd, 100_000), text[4:], "content at the offset")
    os.write(fd, b" later")
    equal(os.pread(fd, 100_000, 0), text + b" later", "content after a write")
equal(os.fstat(deleted).st_nlink, 0, "links of the deleted file")
equal(os.fstat(deleted).st_mode & 0o777, 0o640, "mode of the deleted file")
with open("replaced") as f:
    equal(f.read(), "the new file", "content of the new file")
left = sorted(n for n in os.listdir(".") if "link_remap" in n or "ghost" in n or n == "deleted")
equal(left, [], "files left over by the checkpoint")
passed()
