"""Linux calls that Python 3.11 has no function for, by ctypes; errors are raised as OSError."""

import ctypes
import os
import struct

_libc = ctypes.CDLL(None, use_errno=True)
TIMERSPEC = struct.Struct("qqqq")


def call(name, *args, restype=ctypes.c_int):
    """Calls a function of the C library; -1 becomes OSError. Integers go as C longs."""
    fn = getattr(_libc, name)
    fn.restype = restype
    ctypes.set_errno(0)
    got = fn(*[ctypes.c_long(a) if isinstance(a, int) else a for a in args])
    if got in (-1, 2**64 - 1) and ctypes.get_errno():
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return got


def timerspec(first_s, interval_s=0.0):
    """A struct itimerspec (interval, then first expiry) from seconds."""

    def split(s):
        return int(s), int((s % 1) * 1e9)

    return TIMERSPEC.pack(*split(interval_s), *split(first_s))


def from_timerspec(raw):
    """(seconds to the next expiry, interval in seconds) of a struct itimerspec."""
    i_s, i_ns, v_s, v_ns = TIMERSPEC.unpack(raw)
    return v_s + v_ns / 1e9, i_s + i_ns / 1e9


def sigset(*signals):
    """A kernel's 64-bit signal mask, padded to the C library's sigset_t."""
    return struct.pack("Q", sum(1 << (s - 1) for s in signals)) + bytes(120)
