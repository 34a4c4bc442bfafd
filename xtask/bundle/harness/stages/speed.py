"""Stall, capture, resume and overhead by the size of the state, beside CRIU with the driver's plain checkpoint and beside
plain copies, in one run."""

import statistics
import time

from harness import processes
from harness.peer import Peer
from harness.stages import memory
from harness.stages.common import (
    GIGA,
    MEBI,
    Job,
    Skip,
    bytes_of,
    driver_for_peers,
    expect_ok,
    gpt,
    need,
    resume,
    room,
    state,
    times_of,
    until_settled,
)

QUICK_GB = [0.05]
# Beside the state itself, host memory that has to stay free.
SPARE_BYTES = 6 * GIGA
# A mirror and a store, or what the driver copies and the images.
COPIES = 2
LAUNCHES = 200_000
LAUNCH_QUANTILE = 0.05


def run(settings, records):
    plain = records.step("plain pinned copies", copies, settings, needs_s=10)
    records.step("capture and copy back", memory.ratios, settings, needs_s=20)
    records.step("launches", launches, settings, needs_s=20)
    sizes = QUICK_GB if settings.is_quick else sorted(settings.sizes_gb)
    # Large ones last: they take what time is left.
    small = [size for size in sizes if size <= 10]
    by_size(settings, records, plain, small)
    records.step("steps of a training", steps, settings, needs_s=60)
    by_size(settings, records, plain, [size for size in sizes if size > 10])


def by_size(settings, records, plain, sizes):
    """Each size by both ways. One for which there is no time by what the one before has taken is left out."""
    seconds_per_gb = 2.0
    for size_gb in sizes:
        needs_s = 10 + size_gb * seconds_per_gb
        begun = time.monotonic()
        ours = records.step(f"{size_gb:g} GB, ckpt-run", by_ckpt_run, settings, size_gb, plain, needs_s=needs_s)
        theirs = records.step(f"{size_gb:g} GB, CRIU and driver", by_criu, settings, size_gb, needs_s=needs_s)
        if ours and theirs:
            records.step(f"{size_gb:g} GB, both", beside, ours, theirs)
            if size_gb >= 5:
                seconds_per_gb = (time.monotonic() - begun) / size_gb / 2


def copies(settings):
    need(settings, "driver")
    size_bytes = (64 if settings.is_quick else 2048) * MEBI
    said = processes.ok([settings.at("bin/copies"), size_bytes], 60, env=settings.env(), apart=True)
    to_host, to_device = (float(word) for word in said.split())
    return {"to_host_gbps": to_host, "to_device_gbps": to_device, "bytes": size_bytes}


def check_room(settings, size_bytes):
    """Says what is too small for this size."""
    need(settings, "driver", "checkpoint", "criu")
    free = settings.facts["driver"]["free_bytes"]
    if size_bytes > free * 0.95:
        raise Skip(f"left out: the GPU has {free / GIGA:.1f} GB free")
    needed = COPIES * size_bytes + (SPARE_BYTES if not settings.is_quick else 0)
    if needed > room(settings):
        raise Skip(
            f"left out: it takes {needed / GIGA:.0f} GB of host memory (a copy of the state, and the snapshot on a "
            f"tmpfs), {room(settings) / GIGA:.0f} GB are available"
        )


def by_ckpt_run(settings, size_gb, plain):
    size_bytes = int(size_gb * GIGA)
    check_room(settings, size_bytes)
    job = Job(settings, f"speed-{size_gb:g}", state(settings, size_bytes))
    try:
        job.start().until_answering()
        until_settled(job)
        saved = []
        # The first one fetches the memory for all that follow. Large ones are not taken often.
        for _ in range(3 if size_gb < 20 else 2):
            saved.append(job.only_checkpoint())
        expect_ok(job)
        pause = job.parts("pause", job.said_at("an agent has detached"))
        job.kill()
        resume_s = resume(job)
        expect_ok(job)
        resumed = job.parts("resume", job.begun_unix_s)
        resumed_in_s = job.resumed_s()
        # What the resume has left is saved and resumed in turn.
        again = job.only_checkpoint()
        expect_ok(job)
        job.kill()
        resume(job)
        expect_ok(job)
        best = min(saved, key=lambda one: one["gap_s"])
        values = {
            "bytes": bytes_of(best),
            "first_stall_s": saved[0]["gap_s"],
            "stall_best_s": best["gap_s"],
            "durable_s": best["durable_s"],
            **times_of(best),
            **pause,
            "resume_s": resume_s,
            "resumed_in_s": resumed_in_s,
            **resumed,
            "stall_after_resume_s": again["gap_s"],
            "resumed_again_in_s": job.resumed_s(),
        }
        if plain and values["capture_s"] > 0:
            values["capture_gbps"] = values["bytes"] / values["capture_s"] / GIGA
            copied_s = values["bytes"] / plain["to_host_gbps"] / GIGA
            values["captured_beside_plain"] = copied_s / values["capture_s"]
            values["stall_beyond_copy_s"] = values["stall_best_s"] - copied_s
        return values
    finally:
        job.drop()


def by_criu(settings, size_gb):
    size_bytes = int(size_gb * GIGA)
    check_room(settings, size_bytes)
    program = Peer(settings, f"speed-criu-{size_gb:g}", state(settings, size_bytes), driver_for_peers(settings))
    try:
        until_settled(program)
        taken = program.round_trip(200)
        expect_ok(program)
        return taken
    finally:
        program.drop()


def beside(ours, theirs):
    return {
        "stall_ratio": ours["stall_best_s"] / theirs["stall_best_s"],
        "resume_ratio": ours["resume_s"] / theirs["resume_s"],
    }


def launches(settings):
    """A launch-bound program with and without the interposer, in turns."""
    need(settings, "driver")
    count = 4_000 if settings.is_quick else LAUNCHES
    # Nobody listens there.
    preloaded = {"LD_PRELOAD": settings.interposer, "CKPT_AGENT_SOCKET": f"{settings.work}/nobody"}
    parts = {False: [], True: []}
    for turn in range(2 if settings.is_quick else 6):
        for preload in (turn % 2 == 1, turn % 2 == 0):
            more = preloaded if preload else {}
            said = processes.ok([settings.at("bin/launches"), count], 60, env=settings.env(**more), apart=True)
            parts[preload] += [float(line) for line in said.split()]
    per_part = count / len(said.split())
    at = {preload: sorted(found)[int(len(found) * LAUNCH_QUANTILE)] for preload, found in parts.items()}
    return {
        "launch_ns": at[False] / per_part * 1e9,
        "added_ns": (at[True] - at[False]) / per_part * 1e9,
        "launch_slowdown": at[True] / at[False] - 1,
    }


def steps(settings):
    """A training with and without ckpt-run, without a checkpoint, in turns: the median step of each."""
    need(settings, "torch", "criu")
    on_gpu = settings.torch_device == "cuda"
    count = "40" if settings.is_quick else "300"
    size = [] if settings.is_quick else ["--layers", "12", "--width", "768", "--heads", "12", "--length", "512"]
    medians = {False: [], True: []}
    for turn in range(1 if settings.is_quick else 2):
        for is_ours in (turn % 2 == 1, turn % 2 == 0):
            argv = gpt(settings, *size, "--steps", count, "--times", f"{settings.work}/times.txt")
            if is_ours:
                job = Job(settings, f"steps-{turn}", argv, on_gpu)
                try:
                    job.start().wait(100)
                finally:
                    job.drop()
            else:
                processes.ok(argv, 100, env=settings.env(), cwd=settings.work)
            with open(f"{settings.work}/times.txt") as file:
                times = [float(line) for line in file]
            medians[is_ours].append(statistics.median(times[len(times) // 5 :]))
    return {
        "step_s": min(medians[False]),
        "step_slowdown": min(medians[True]) / min(medians[False]) - 1,
        "medians_without_s": medians[False],
        "medians_with_s": medians[True],
    }
