"""A file that is appended to all the time (O_APPEND): in the end it has every line once, in order."""

import os
import threading

from harness import await_go, equal, passed, start, until, wait


def main(flags):
    start()
    fd = os.open("lines.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flags, 0o644)
    lines = 0

    def write():
        nonlocal lines
        os.write(fd, f"{lines}\n".encode())
        lines += 1

    thread = threading.Thread(target=await_go, args=(write,))
    thread.start()
    until(lambda: lines > 2, "the first lines")

    wait()

    thread.join()
    write()
    with open("lines.txt") as f:
        found = f.read().split()
    equal(found, [str(n) for n in range(lines)], "lines of the file")
    passed()


if __name__ == "__main__":
    main(os.O_APPEND)
