"""What the driver and the machine do without ckpt-run: settings, the driver's own memory, its mappings around its own
checkpoint, and exports of imported memory."""

import json
import sys

from harness import peer, processes
from harness.stages.common import Fail, driver_for_peers, expect_ok, need, state, until_settled, write_log

def run(settings, records):
    records.step("settings", asked, settings, "settings", needs_s=5)
    records.step("driver's own memory", asked, settings, "memory", needs_s=10)
    records.step("maps", maps_of_state, settings, needs_s=15)
    records.step("maps of pinned memory", maps_of_pinned, settings, needs_s=15)
    records.step("export of an imported handle", exported, settings, needs_s=15)


def asked(settings, what):
    need(settings, "driver")
    words = [sys.executable, settings.at("programs/driver_facts.py"), settings.facts["libcuda"], what]
    return json.loads(processes.ok(words, 60, env=settings.env(), apart=True))


def exported(settings):
    values = asked(settings, "export")
    if values.get("is_content_right") is False:
        raise Fail("the content is not what was written", values)
    return values


def maps_of_state(settings):
    need(settings, "driver", "checkpoint")
    size_bytes = (16 << 20) if settings.is_quick else (256 << 20)
    program = peer.Peer(settings, "maps-state", state(settings, size_bytes), driver_for_peers(settings), gently=True)
    try:
        until_settled(program)
        values = around_a_checkpoint(settings, program)
        expect_ok(program)
        return values
    finally:
        program.drop()


def maps_of_pinned(settings):
    need(settings, "driver", "checkpoint")
    program = peer.Peer(
        settings, "maps-pinned", [settings.at("bin/pinned"), 10**9], driver_for_peers(settings), gently=True
    )
    try:
        open(program.path("slow"), "w").close()
        processes.until("the driver", lambda: bool(program.maps()["zero"]), 30, program.wrong)
        values = around_a_checkpoint(settings, program)
        if program.wrong():
            raise Fail(program.wrong(), values)
        return values
    finally:
        program.drop()


def around_a_checkpoint(settings, program):
    """/proc/PID/maps before, between and after, in a log each; what of it is the driver's."""
    seen = {"before": program.maps()}
    program.driver.lock(program.pid)
    program.driver.checkpoint(program.pid)
    seen["between"] = program.maps()
    program.driver.restore(program.pid)
    program.driver.unlock(program.pid)
    seen["after"] = program.maps()
    for when, found in seen.items():
        write_log(settings, f"{program.name}-{when}.maps", "\n".join(found["lines"]))
    before, between, after = (found["ranges"] for found in seen.values())
    gone = minus(before, between)
    values = {
        "device_mappings": [len(found["device"]) for found in seen.values()],
        "device_descriptors": [found["descriptors"] for found in seen.values()],
        "zero_mappings": len(seen["before"]["zero"]),
        "zero_mappings_between": len(seen["between"]["zero"]),
        "unmapped_bytes": count(gone),
        "not_mapped_again_bytes": count(minus(gone, after)),
    }
    if seen["between"]["device"] or seen["between"]["descriptors"]:
        raise Fail("a checkpoint leaves the driver's device files", values)
    return values


def count(ranges):
    return sum(end - begin for begin, end in ranges)


def minus(ranges, others):
    """What of address ranges is in none of the others, which are sorted."""
    left = []
    for begin, end in ranges:
        for other_begin, other_end in others:
            if other_end <= begin:
                continue
            if other_begin >= end:
                break
            if other_begin > begin:
                left.append((begin, other_begin))
            begin = other_end
            if begin >= end:
                break
        if begin < end:
            left.append((begin, end))
    return left
