"""Interval timers (real, virtual, profiling): remaining time and interval kept, SIGALRM goes on arriving."""

import signal

from harness import check, passed, start, until, wait

start()
alarms = []
signal.signal(signal.SIGALRM, lambda *_: alarms.append(1))
signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
signal.setitimer(signal.ITIMER_VIRTUAL, 5000, 11)
signal.setitimer(signal.ITIMER_PROF, 6000, 12)
until(lambda: alarms, "first alarm")

wait()

remaining, interval = signal.getitimer(signal.ITIMER_VIRTUAL)
check(4900 < remaining < 5001 and interval == 11, f"virtual: {remaining} s, interval {interval} s")
remaining, interval = signal.getitimer(signal.ITIMER_PROF)
check(5900 < remaining < 6001 and interval == 12, f"profiling: {remaining} s, interval {interval} s")
alarms.clear()
until(lambda: len(alarms) >= 3, "three more alarms")
remaining, interval = signal.getitimer(signal.ITIMER_REAL)
check(interval == 0.05, f"interval of the real timer: {interval} s")
signal.setitimer(signal.ITIMER_REAL, 0)
passed()
