"""Scheduling policy and niceness, of the process and of one thread."""

import os
import threading

from harness import equal, passed, start, wait

start()
go, ready, found = threading.Event(), threading.Event(), {}


def run():
    me = threading.get_native_id()
    os.sched_setscheduler(me, os.SCHED_IDLE, os.sched_param(0))
    os.setpriority(os.PRIO_PROCESS, me, 11)
    ready.set()
    go.wait(60)
    found["thread"] = os.sched_getscheduler(me), os.getpriority(os.PRIO_PROCESS, me)


thread = threading.Thread(target=run)
thread.start()
ready.wait(10)
os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
os.setpriority(os.PRIO_PROCESS, os.getpid(), 7)

wait()

equal(os.sched_getscheduler(0), os.SCHED_BATCH, "policy")
equal(os.getpriority(os.PRIO_PROCESS, os.getpid()), 7, "niceness")
go.set()
thread.join(20)
equal(found["thread"], (os.SCHED_IDLE, 11), "policy and niceness of the thread")
passed()
