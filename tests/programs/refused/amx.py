"""AMX is refused as on a CPU without it, so that programs fall back, before and after (only under ckpt-run)."""

import ctypes
import errno

import _path  # noqa: F401
from harness import equal, passed, start, wait
from linux import call

SYS_ARCH_PRCTL = 158
ARCH_GET_XCOMP_PERM, ARCH_REQ_XCOMP_PERM = 0x1022, 0x1023
TILE_DATA = 18


def answer():
    """The error of the request for AMX's tile registers; 0 if they are granted."""
    try:
        call("syscall", SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, TILE_DATA)
        return 0
    except OSError as e:
        return e.errno


def is_permitted():
    """Whether the process may use the tile registers."""
    features = ctypes.c_uint64()
    call("syscall", SYS_ARCH_PRCTL, ARCH_GET_XCOMP_PERM, ctypes.byref(features))
    return bool(features.value >> TILE_DATA & 1)


start()
equal(answer(), errno.EOPNOTSUPP, "answer to the request for AMX before")
equal(is_permitted(), False, "permission before")

wait()

equal(answer(), errno.EOPNOTSUPP, "answer to the request for AMX afterwards")
equal(is_permitted(), False, "permission afterwards")
passed()
