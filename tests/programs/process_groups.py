"""Process groups and sessions: members, a group without its leader, signals to groups, a stopped process."""

import os
import signal
import time

from harness import child, equal, passed, process_state, reap, start, until, wait

start()
r, w = os.pipe()


def member(group=None, session=False, leader_leaves=False):
    """Joins or leads a group or session, tells it, and waits for a signal."""
    if session:
        os.setsid()
    elif group is not None:
        os.setpgid(0, group)
    if leader_leaves and os.fork():
        return
    os.write(w, f"{os.getpid()} {os.getpgid(0)} {os.getsid(0)}\n".encode())
    time.sleep(1000)


def add(**how):
    """Starts a member; returns its (pid, group, session)."""
    pid = child(lambda: member(**how))
    if how.get("leader_leaves"):
        reap(pid)
    return tuple(int(word) for word in os.read(r, 100).split())


leader = add(group=0)
second = add(group=leader[0])
own_session = add(session=True)
leaderless = add(group=0, leader_leaves=True)
stopped = add()
os.kill(stopped[0], signal.SIGSTOP)
until(lambda: process_state(stopped[0]) == "T", "the process is stopped")
everyone = (leader, second, own_session, leaderless, stopped)

wait()

equal(second[1], leader[0], "group of the second member")
for pid, group, session in everyone:
    equal((os.getpgid(pid), os.getsid(pid)), (group, session), f"group and session of {pid}")
equal(process_state(stopped[0]), "T", "state of the stopped process")
os.kill(stopped[0], signal.SIGCONT)
until(lambda: process_state(stopped[0]) == "S", "the stopped process goes on")
os.killpg(leader[0], signal.SIGTERM)
for pid in (leader[0], second[0]):
    reap(pid, -signal.SIGTERM)
os.killpg(leaderless[1], signal.SIGTERM)
until(lambda: not os.path.exists(f"/proc/{leaderless[0]}"), "end of the leaderless member")
for pid in (own_session[0], stopped[0]):
    os.kill(pid, signal.SIGKILL)
    reap(pid, -signal.SIGKILL)
passed()
