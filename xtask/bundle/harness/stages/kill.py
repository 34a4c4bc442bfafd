"""Ends of processes that the driver has restored, the harmless ones first: the last may hang the machine."""

import subprocess
import sys

from harness import peer, processes
from harness.machine import ask_driver
from harness.records import Fail
from harness.stages.common import driver_for_peers, need, state, until_settled

KILLS = 3
# A GPU that has not answered a new process by then does not work.
LIMIT_S = 10


def run(settings, records):
    records.step("after lock and checkpoint", killed, settings, True, needs_s=15)
    records.step("restore without memory", without_memory, settings, needs_s=10)
    records.step("without checkpoint", killed, settings, False, needs_s=10)


def restored(settings, name, gently):
    """A process that the driver has taken off the GPU and brought back."""
    program = started(settings, name, gently)
    for step in (program.driver.lock, program.driver.checkpoint, program.driver.restore, program.driver.unlock):
        step(program.pid)
    until_settled(program, 3, 60)
    return program


def started(settings, name, gently):
    need(settings, "driver", "checkpoint")
    size_bytes = (16 << 20) if settings.is_quick else (1 << 30)
    program = peer.Peer(settings, name, state(settings, size_bytes), driver_for_peers(settings), gently=gently)
    until_settled(program, 3)
    return program


def killed(settings, gently):
    """Whether a new process can use the GPU after each kill."""
    for number in range(1, KILLS + 1):
        restored(settings, f"killed-{'gently' if gently else 'hard'}-{number}", gently).kill()
        found = ask_driver(settings, settings.facts["libcuda"], LIMIT_S)
        if not found["driver"]:
            values = {"kills": number, "gpu_works": False}
            if gently:
                raise Fail(f"the GPU does not work: {found['driver_error']}", values)
            return {**values, "error": found["driver_error"]}
    return {"kills": KILLS, "gpu_works": True}


def without_memory(settings):
    """What a restore says while another process has all memory, and once that has ended."""
    program = started(settings, "no-memory", True)
    try:
        program.driver.lock(program.pid)
        program.driver.checkpoint(program.pid)
        words = [sys.executable, settings.at("programs/driver_facts.py"), settings.facts["libcuda"], "hog"]
        pipe = subprocess.PIPE
        hog = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=settings.env())
        taken = hog.stdout.readline().strip()
        if not taken:
            raise Fail(f"no memory was taken: {processes.tail(hog.stderr.read())}")
        first = program.driver.code("cuCheckpointProcessRestore", program.pid)
        hog.communicate()
        later = program.driver.code("cuCheckpointProcessRestore", program.pid)
        return {"taken": taken, "first_error": first, "later_error": later if first else None}
    finally:
        program.drop()
