"""io_uring is answered with ENOSYS so that programs fall back, before and after (only under ckpt-run)."""

import ctypes
import errno
import threading

import _path  # noqa: F401
from harness import equal, passed, start, wait
from linux import call

SYS_IO_URING_SETUP = 425


def answer():
    """The error of io_uring_setup; 0 if it gives a ring."""
    try:
        call("syscall", SYS_IO_URING_SETUP, 8, ctypes.create_string_buffer(120))
        return 0
    except OSError as e:
        return e.errno


start()
equal(answer(), errno.ENOSYS, "answer to io_uring_setup before")

wait()

answers = []
thread = threading.Thread(target=lambda: answers.append(answer()))
thread.start()
thread.join(20)
equal(answers + [answer()], [errno.ENOSYS] * 2, "answers to io_uring_setup afterwards")
passed()
