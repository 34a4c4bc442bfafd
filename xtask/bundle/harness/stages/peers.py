"""One training, saved by ckpt-run, by CRIU with the driver's plain checkpoint, by torch.save and by DCP's async_save: how
long it stands still, until the snapshot is written, and until a new process has it back. All write to the same place."""

import json
import os
import time

from harness import machine, processes
from harness.peer import Peer
from harness.stages.common import (
    GIGA,
    Fail,
    Job,
    Skip,
    bytes_of,
    driver_for_peers,
    gpt,
    need,
    resume,
    times_of,
    until_settled,
)

# Losses that all ways must agree on, as far as they have trained.
REFERENCE = "peers-losses.json"


def run(settings, records):
    words, size = training(settings)
    needs_s = 15 + 3 * size / GIGA
    ours = records.step("ckpt-run", by_ckpt_run, settings, words, needs_s=needs_s)
    theirs = records.step("CRIU with plain driver checkpoint", by_criu, settings, words, needs_s=needs_s)
    records.step("torch.save", by_torch_save, settings, words, needs_s=needs_s)
    records.step("DCP async_save", by_dcp, settings, words, needs_s=needs_s)
    records.step("ckpt-run beside CRIU and driver", beside, ours, theirs)


def training(settings):
    """The command, and about how large its state is, in bytes."""
    if settings.is_quick:
        return gpt(settings), 10**6
    driver = settings.facts.get("driver") or {"free_bytes": 0}
    most = min(driver["free_bytes"] * 0.6, machine.memory("MemAvailable") / 2.4) / GIGA
    gigabytes = max(min(settings.torch_gb, most), 0.1)
    width = "4096" if gigabytes > 20 else "2048"
    return gpt(settings, "--gigabytes", f"{gigabytes:.2f}", "--width", width, "--heads", "16"), gigabytes * GIGA


def same_losses(settings, program):
    """Whatever it has been through, its losses are those of the others; the most that is known is kept."""
    found = program.ask("losses", 60).split()
    path = os.path.join(settings.work, REFERENCE)
    known = []
    if os.path.exists(path):
        with open(path) as file:
            known = json.load(file)
    common = min(len(known), len(found))
    if known[:common] != found[:common]:
        raise Fail(f"the losses differ from another run's within {common} steps", {"is_bit_equal": False})
    if len(found) > len(known):
        with open(path, "w") as file:
            json.dump(found, file)
    return {"compared_steps": common, **({"is_bit_equal": True} if common else {})}


def by_ckpt_run(settings, words):
    need(settings, "torch", "criu")
    on_gpu = settings.torch_device == "cuda"
    if on_gpu:
        need(settings, "driver", "checkpoint")
    job = Job(settings, "peers-ckpt-run", words, on_gpu)
    try:
        job.start().until_answering()
        until_settled(job, 3)
        saved = []
        for _ in range(2):
            saved.append(job.only_checkpoint())
        step_s = seconds_of_a_step(job)
        job.kill()
        resume_s = resume(job)
        until_settled(job, 3)
        return {
            "state_bytes": bytes_of(saved[-1]),
            "stall_s": [one["gap_s"] for one in saved],
            "stall_best_s": min(one["gap_s"] for one in saved),
            "durable_s": saved[-1]["durable_s"],
            **times_of(saved[-1]),
            "resume_s": resume_s,
            "step_s": step_s,
            **same_losses(settings, job),
        }
    finally:
        job.drop()


def seconds_of_a_step(program):
    program.ask("steps")
    time.sleep(1)
    steps, seconds = program.ask("steps").split()
    return float(seconds) / max(int(steps), 1)


def by_criu(settings, words):
    need(settings, "driver", "checkpoint", "criu", "torch", "torch-gpu")
    program = Peer(settings, "peers-criu", words, driver_for_peers(settings))
    try:
        until_settled(program, 3)
        taken = program.round_trip(120)
        until_settled(program, 3)
        return {**taken, **same_losses(settings, program)}
    finally:
        program.drop()


def by_torch_save(settings, words):
    need(settings, "torch")
    path = os.path.join(settings.fast, "torch-save.pt")
    return by_code(settings, words, "torch-save", path, "--torch-load", lambda program, said: float(said.split()[1]))


def by_dcp(settings, words):
    need(settings, "torch")
    version = tuple(int(word) for word in settings.facts["torch"]["version"].split(".")[:2])
    if version < (2, 4):
        raise Skip(f"torch {settings.facts['torch']['version']} has no async_save; 2.4 has")
    path = os.path.join(settings.fast, "dcp")

    def durable(program, _):
        processes.until("async_save", lambda: os.path.exists(path + ".done"), 120, program.wrong)
        with open(path + ".done") as file:
            return float(file.read())

    return by_code(settings, words, "dcp-save", path, "--dcp-load", durable)


def by_code(settings, words, word, path, load, durable):
    """A training that saves itself, twice: the second time, whatever is kept for it is there."""
    program = Peer(settings, f"peers-{word}", words, None)
    try:
        until_settled(program, 3)
        stalls = []
        for _ in range(2):
            remove(path)
            said = program.ask(f"{word} {path}", 120)
            stalls.append(float(said.split()[0]))
            durable_s = durable(program, said)
        losses = same_losses(settings, program)
    finally:
        program.drop()
    begun = time.monotonic()
    program = Peer(settings, f"peers-{word}-again", [*words, load, path], None)
    try:
        program.put("gap")
        program.take("gap", 120)
        resume_s = time.monotonic() - begun
        if word == "torch-save":  # DCP's snapshot has no losses in it
            until_settled(program, 3)
            losses = same_losses(settings, program)
        return {"stall_s": stalls, "stall_best_s": min(stalls), "durable_s": durable_s, "resume_s": resume_s, **losses}
    finally:
        program.drop()
        remove(path)


def remove(path):
    import shutil

    shutil.rmtree(path, ignore_errors=True)
    for one in (path, path + ".done"):
        if os.path.isfile(one):
            os.unlink(one)


def beside(ours, theirs):
    if not ours or not theirs:
        raise Skip("only one of them was measured")
    return {
        "stall_ratio": ours["stall_best_s"] / theirs["stall_best_s"],
        "resume_ratio": ours["resume_s"] / theirs["resume_s"],
    }
