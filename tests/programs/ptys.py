"""A pty whose slave is a child's controlling terminal: settings, window size, data in flight, job control."""

import array
import fcntl
import os
import signal
import struct
import termios
import tty

from harness import await_go, check, child, equal, passed, reap, read_exactly, start, until, wait

TIOCGSID = 0x5429

start()
master, slave = os.openpty()
tty.setraw(slave)
attrs = termios.tcgetattr(slave)
attrs[6][termios.VINTR] = b"\x07"
attrs[3] |= termios.ISIG
termios.tcsetattr(slave, termios.TCSANOW, attrs)
fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 77, 0, 0))
interrupts = []


def on_terminal():
    os.setsid()
    fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
    os.close(master)
    signal.signal(signal.SIGINT, lambda *_: interrupts.append(1))
    os.write(slave, b"from child")
    await_go()
    equal(read_exactly(slave, 11), b"from parent", "data queued to the child")
    ctty = os.open("/dev/tty", os.O_RDWR)
    equal(os.tcgetpgrp(ctty), os.getpid(), "foreground group of the terminal")
    session = array.array("i", [0])
    fcntl.ioctl(ctty, TIOCGSID, session)
    equal(session[0], os.getpid(), "session of the terminal")
    os.write(ctty, b"/later")
    until(lambda: interrupts, "SIGINT from the terminal")
    os.write(ctty, b"/interrupted")


pid = child(on_terminal)
equal(os.read(master, 1), b"f", "first byte from the child")
os.write(master, b"from parent")

wait()

equal(read_exactly(master, 9), b"rom child", "data queued to the parent")
equal(termios.tcgetattr(slave), attrs, "terminal settings")
size = struct.unpack("HHHH", fcntl.ioctl(slave, termios.TIOCGWINSZ, b"\0" * 8))
equal(size[:2], (33, 77), "window size")
equal(read_exactly(master, 6), b"/later", "data from /dev/tty")
os.write(master, b"\x07")
equal(read_exactly(master, 12), b"/interrupted", "answer to the interrupt key")
check(os.ttyname(slave).startswith("/dev/pts/"), "the slave has no name")
reap(pid)
passed()
