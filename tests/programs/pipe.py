"""Data in flight in a pipe each way between parent and child, pipe size kept, both used afterwards."""

import fcntl
import os
import select

from harness import await_go, check, child, equal, passed, reap, read_exactly, start, wait

QUEUED = bytes(range(256)) * 200
F_SETPIPE_SZ, F_GETPIPE_SZ = 1031, 1032

start()
down_r, down_w = os.pipe()
up_r, up_w = os.pipe()
fcntl.fcntl(down_w, F_SETPIPE_SZ, 1 << 18)
os.set_blocking(up_r, False)


def serve():
    os.close(down_w)
    os.close(up_r)
    os.write(up_w, b"queued up")
    await_go()
    equal(read_exactly(down_r, len(QUEUED)), QUEUED, "data queued down")
    os.write(up_w, b"/" + os.read(down_r, 100))
    equal(os.read(down_r, 1), b"", "end of the pipe down")


pid = child(serve)
os.close(down_r)
os.close(up_w)
os.write(down_w, QUEUED)
check(select.select([up_r], [], [], 10)[0], "the child wrote nothing")

wait()

equal(os.read(up_r, 100)[:9], b"queued up", "data queued up")
equal(fcntl.fcntl(down_w, F_GETPIPE_SZ), 1 << 18, "size of the pipe")
check(not os.get_blocking(up_r), "O_NONBLOCK is lost")
os.set_blocking(up_r, True)
os.write(down_w, b"later")
equal(os.read(up_r, 100).strip(b"/"), b"later", "echo")
os.close(down_w)
equal(os.read(up_r, 1), b"", "end of the pipe up")
reap(pid)
passed()
