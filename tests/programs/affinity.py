"""CPU affinity of each thread (trivial where there is only one CPU)."""

import os
import threading

from harness import equal, passed, start, wait

start()
cpus = sorted(os.sched_getaffinity(0))
go, ready = threading.Event(), threading.Semaphore(0)
found = {}


def run(n):
    os.sched_setaffinity(0, {cpus[n % len(cpus)]})
    ready.release()
    go.wait(60)
    found[n] = os.sched_getaffinity(0)


threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
for thread in threads:
    thread.start()
    ready.acquire()

wait()

go.set()
for thread in threads:
    thread.join(20)
equal(found, {n: {cpus[n % len(cpus)]} for n in range(4)}, "CPUs of the threads")
equal(sorted(os.sched_getaffinity(0)), cpus, "CPUs of the main thread")
passed()
