"""300 threads, each blocked and with its own state: all are there afterwards, go on and end."""

import os
import threading

from harness import equal, passed, start, wait

COUNT = 300
start()
threading.stack_size(256 << 10)
local = threading.local()
ready, results = threading.Semaphore(0), {}
gates = [threading.Lock() for _ in range(COUNT)]
pipe_r, pipe_w = os.pipe()


def run(n):
    local.counter = n * 1000
    thread_id = threading.get_native_id()
    ready.release()
    if n % 10 == 0:
        os.read(pipe_r, 1)  # every tenth is blocked in the kernel's pipe, the others in a futex
    else:
        gates[n].acquire()
    local.counter += 1
    results[n] = local.counter, thread_id == threading.get_native_id()


for gate in gates:
    gate.acquire()
threads = [threading.Thread(target=run, args=(n,)) for n in range(COUNT)]
for thread in threads:
    thread.start()
for _ in range(COUNT):
    ready.acquire()

wait()

equal(threading.active_count(), COUNT + 1, "threads that Python knows")
equal(len(os.listdir("/proc/self/task")), COUNT + 2, "threads, with the watchdog")
equal(results, {}, "threads that went on too early")
for gate in gates:
    gate.release()
os.write(pipe_w, b"x" * COUNT)
for thread in threads:
    thread.join(20)
equal(results, {n: (n * 1000 + 1, True) for n in range(COUNT)}, "state of the threads")
passed()
