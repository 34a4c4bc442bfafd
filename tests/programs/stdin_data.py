"""Standard input with `line 0` to `line 9`: three are read before, the rest afterwards (77 without)."""

import os
import select

from harness import equal, passed, start, unavailable, wait


def read_line():
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    return line


start()
if os.isatty(0) or not select.select([0], [], [], 2)[0] or read_line() != b"line 0\n":
    unavailable("standard input does not hold the lines")
for n in (1, 2):
    equal(read_line(), b"line %d\n" % n, "line before")

wait()

for n in range(3, 10):
    equal(read_line(), b"line %d\n" % n, "line afterwards")
passed()
