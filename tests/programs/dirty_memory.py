"""Memory that is written all the time, in every way: pages in order and at random, freed and mapped again, moved, in huge
pages, and shared with forked processes until one of them writes.

Each page has its number and a version in its first bytes, which the program also has elsewhere.
"""

import mmap
import random
import struct

from harness import await_go, check, child, equal, passed, reap, start, wait

PAGE = 4096
PAGES = 4096
HUGE = 2 << 20


class Memory:
    """Pages with a version each."""

    def __init__(self, pages, advice=None):
        self.map = mmap.mmap(-1, pages * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if advice is not None:
            self.map.madvise(advice)
        self.versions = [0] * pages
        for page in range(pages):
            self.write(page)

    def write(self, page):
        self.versions[page] += 1
        struct.pack_into("<QQ", self.map, page * PAGE, page, self.versions[page])

    def free(self, page):
        """The page is zero from now on."""
        self.versions[page] = 0
        self.map.madvise(mmap.MADV_DONTNEED, page * PAGE, PAGE)

    def verify(self, what):
        for page, version in enumerate(self.versions):
            expected = (page, version) if version else (0, 0)
            equal(struct.unpack_from("<QQ", self.map, page * PAGE), expected, f"{what}: page {page}")


start()
random.seed(1)
plain = Memory(PAGES)
huge = Memory(4 * HUGE // PAGE, mmap.MADV_HUGEPAGE)
inherited = Memory(512)
grown = None


def child_side():
    """Writes to some of its pages while it waits: these are its own, the others are its parent's still."""
    await_go(lambda: inherited.write(random.randrange(256)))
    inherited.verify("inherited memory")


pid = child(child_side)
rounds = 0


def tick():
    global rounds, grown
    rounds += 1
    for page in range(200):
        plain.write(page)
    for page in random.sample(range(200, PAGES), 40):
        plain.write(page)
    plain.free(random.randrange(200, PAGES))
    huge.write(random.randrange(len(huge.versions)))
    inherited.write(random.randrange(256, 512))
    # New memory at an address that had other content, and memory that moves.
    grown = Memory(64)
    grown.map.resize(1024 * PAGE)
    grown.versions += [0] * (1024 - 64)
    grown.write(1023)


wait(tick)

check(rounds > 0, "nothing was written")
plain.verify("memory")
huge.verify("huge pages")
inherited.verify("memory that a child has inherited")
grown.verify("memory that was moved")
reap(pid)
passed()
