"""Open files: offsets and flags kept, also of a description shared by two descriptors and with a child."""

import fcntl
import os

from harness import await_go, check, child, equal, passed, reap, start, wait

start()
with open("input", "wb") as f:
    f.write(bytes(range(256)) * 16)
reader = os.open("input", os.O_RDONLY | os.O_CLOEXEC)
os.read(reader, 100)
twin = os.dup2(reader, 100)
writer = os.open("output", os.O_RDWR | os.O_CREAT)
os.set_inheritable(writer, True)
os.write(writer, b"0123456789")
os.lseek(writer, -3, os.SEEK_END)
directory = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
path_only = os.open("input", os.O_PATH)
null, zero = os.open("/dev/null", os.O_WRONLY), os.open("/dev/zero", os.O_RDONLY)


def shares_offset():
    await_go()
    equal(os.lseek(reader, 1, os.SEEK_CUR), 101, "offset seen by the child")


pid = child(shares_offset)

wait()

reap(pid)
equal(os.lseek(twin, 0, os.SEEK_CUR), 101, "offset moved by the child")
equal(os.read(reader, 2), bytes([101, 102]), "data at the offset")
equal(os.lseek(twin, 0, os.SEEK_CUR), 103, "offset of the duplicate")
check(not os.get_inheritable(reader) and os.get_inheritable(writer), "close-on-exec flags")
equal(fcntl.fcntl(reader, fcntl.F_GETFL) & os.O_ACCMODE, os.O_RDONLY, "access mode")
equal(os.read(writer, 100), b"789", "data of the file open for both")
os.write(writer, b"abc")
equal(os.pread(writer, 100, 0), b"0123456789abc", "content after a write")
check("input" in os.listdir(directory), "the directory's descriptor does not list")
equal(os.fstat(path_only).st_ino, os.stat("input").st_ino, "file of the O_PATH descriptor")
equal((os.write(null, b"x"), os.read(zero, 2)), (1, b"\0\0"), "devices")
passed()
