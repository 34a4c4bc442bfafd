"""The job's controlling terminal: foreground group and settings are kept; exit code 77 without one."""

import os
import termios

from harness import equal, passed, start, unavailable, wait


def terminal():
    """What a program can ask of its terminal."""
    with open("/dev/tty", "rb", buffering=0) as tty:
        return {
            "name": os.ttyname(0),
            "foreground group": os.tcgetpgrp(0) == os.getpgid(0) == os.tcgetpgrp(tty.fileno()),
            "settings": termios.tcgetattr(0),
            "size": os.get_terminal_size(0),
        }


start()
if not os.isatty(0):
    unavailable("standard input is no terminal")
attrs = termios.tcgetattr(0)
attrs[3] &= ~termios.ECHO
termios.tcsetattr(0, termios.TCSANOW, attrs)
before = terminal()
print("terminal", before["name"], flush=True)
equal(before["foreground group"], True, "the program is in the foreground")

wait()

after = terminal()
before.pop("name"), before.pop("size")  # another terminal is allowed after a resume
for what, value in before.items():
    equal(after[what], value, what)
print("terminal", after["name"], flush=True)
passed()
