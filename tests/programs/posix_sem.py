"""Semaphores and locks between processes: values, a held lock, children that wait and are let in later."""

import multiprocessing as mp
import os

from harness import check, child, equal, passed, process_state, reap, start, until, wait

start()
context = mp.get_context("fork")
lock, semaphore, order = context.Lock(), context.Semaphore(5), context.RawArray("i", 2)
condition = context.Condition()
lock.acquire()
semaphore.acquire()
semaphore.acquire()


def wait_for_lock():
    with lock:
        order[0] = 1 if order[1] else -1


def wait_for_condition():
    with condition:
        os.write(w, b"x")
        check(condition.wait(250), "the child was not notified")


r, w = os.pipe()
pids = [child(wait_for_lock), child(wait_for_condition)]
os.read(r, 1)
until(lambda: all(process_state(p) == "S" for p in pids), "the children sleep")

wait()

equal(semaphore.get_value(), 3, "value of the semaphore")
check(not lock.acquire(block=False), "the held lock is free")
equal(order[0], 0, "mark of the waiting child")
order[1] = 1
lock.release()
reap(pids[0])
equal(order[0], 1, "order of release and entry")
with condition:
    condition.notify()
reap(pids[1])
check(lock.acquire(timeout=10), "the lock was not given back")
passed()
