"""flock(): exclusive and shared locks are held, a child that waits for one is let in after the release."""

import fcntl
import os

from harness import check, child, equal, passed, process_state, reap, start, until, wait

start()


def lock(name, how):
    fd = os.open(name, os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, how)
    return fd


def is_free(name, how):
    try:
        os.close(lock(name, how | fcntl.LOCK_NB))
        return True
    except BlockingIOError:
        return False


exclusive = lock("exclusive", fcntl.LOCK_EX)
shared = lock("shared", fcntl.LOCK_SH)


def wait_for_lock():
    os.close(exclusive)
    fd = lock("exclusive", fcntl.LOCK_EX)
    equal(os.read(fd, 100), b"released", "content after the wait")


pid = child(wait_for_lock)
until(lambda: process_state(pid) == "S", "the child sleeps")

wait()

check(not is_free("exclusive", fcntl.LOCK_SH), "the exclusive lock is lost")
check(not is_free("shared", fcntl.LOCK_EX), "the shared lock is lost")
check(is_free("shared", fcntl.LOCK_SH), "the shared lock has become exclusive")
os.write(exclusive, b"released")
fcntl.flock(exclusive, fcntl.LOCK_UN)
reap(pid)
fcntl.flock(shared, fcntl.LOCK_UN)
check(is_free("shared", fcntl.LOCK_EX), "the shared lock stays after its release")
passed()
