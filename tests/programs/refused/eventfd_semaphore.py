"""An event counter in semaphore mode: CRIU restores it as a plain counter without a word, so it has to be refused."""

import os

import _path  # noqa: F401
from harness import equal, passed, start, wait

start()
semaphore = os.eventfd(3, os.EFD_SEMAPHORE)
equal(os.eventfd_read(semaphore), 1, "step before")

wait()

equal(os.eventfd_read(semaphore), 1, "step afterwards")
equal(os.eventfd_read(semaphore), 1, "second step afterwards")
passed()
