"""An event counter in semaphore mode: CRIU silently makes it a plain counter, so refuse it."""

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
