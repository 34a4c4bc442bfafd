"""An open file whose name is deleted while another hard link stays: both are still one file."""

import os

from harness import equal, passed, start, wait

start()
fd = os.open("linked", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o640)
os.write(fd, b"0123 linked")
os.lseek(fd, 4, os.SEEK_SET)
os.link("linked", "other-name")
os.unlink("linked")

wait()

equal(os.read(fd, 100), b" linked", "content at the offset")
os.write(fd, b" later")
with open("other-name", "rb") as f:
    equal(f.read(), b"0123 linked later", "content by the other name")
equal(os.fstat(fd).st_ino, os.stat("other-name").st_ino, "inode")
equal([n for n in os.listdir(".") if n.startswith("link_remap")], [], "files left over by the checkpoint")
passed()
