"""Monotonic clocks never go back nor jump far, a sleep that was under way ends, a deadline is still ahead."""

import threading
import time

from harness import check, passed, start, wait

CLOCKS = (time.CLOCK_MONOTONIC, time.CLOCK_MONOTONIC_RAW, time.CLOCK_BOOTTIME)
start()
last = {clock: time.clock_gettime(clock) for clock in CLOCKS}
largest = dict.fromkeys(CLOCKS, 0.0)
slept = []


def sleep():
    began = time.monotonic()
    time.sleep(3)
    slept.append(time.monotonic() - began)


def tick():
    for clock in CLOCKS:
        now = time.clock_gettime(clock)
        check(now >= last[clock], f"clock {clock} went back by {last[clock] - now} s")
        largest[clock] = max(largest[clock], now - last[clock])
        last[clock] = now


thread = threading.Thread(target=sleep)
thread.start()
deadline = threading.Event()
waiter = threading.Thread(target=deadline.wait, args=(100,))
waiter.start()

wait(tick)

tick()
check(max(largest.values()) < 60, f"a clock jumped: {largest}")
thread.join(20)
check(slept and 2.9 < slept[0] < 60, f"a sleep of 3 s took {slept}")
check(waiter.is_alive(), "a wait of 100 s is over")
deadline.set()
waiter.join(20)
passed()
