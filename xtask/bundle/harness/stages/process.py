"""Whole jobs that are saved, killed with SIGKILL and resumed: their output is that of an unbroken run, bit for bit."""

import os

from harness.job import Ended
from harness.stages.common import SLOWLY, Fail, Job, gpt, need, processes

# Rests between two steps, milliseconds: the longer ones for a machine on which a checkpoint takes so long that the job is
# done meanwhile.
RESTS_MS = (25, 100, 400)
LOSSES = "losses.txt"


def run(settings, records):
    steps = "120" if settings.is_quick else "400"
    mlp = [settings.at("bin/train-mlp"), "--steps", steps]
    legacy = [settings.at("bin/legacy-job"), "150" if settings.is_quick else "400", "200"]
    records.step("train-mlp", survives, settings, "mlp", mlp, ["--rest-ms"], needs_s=20)
    records.step("legacy-job", survives, settings, "legacy", legacy, [], needs_s=20)
    records.step("GPT in bf16", training, settings, "gpt", [], needs_s=30)
    if not settings.is_quick:
        large = ["--gigabytes", "2", "--width", "2048", "--heads", "16"]
        records.step("GPT in bf16, 2 GB", training, settings, "gpt-2gb", large, needs_s=60)


def survives(settings, name, argv, slowness):
    """A program of the driver API that prints its state. `slowness` are the arguments before the rest between two steps,
    which changes nothing else."""
    need(settings, "driver", "checkpoint", "criu")
    expected = processes.ok(argv, 100, env=settings.env(), cwd=settings.work, apart=True)
    for rest_ms in RESTS_MS:
        job = Job(settings, name, [*argv, *slowness, rest_ms])
        try:
            values = killed_and_resumed(job, "output.txt", 5 if name == "mlp" else 2)
            job.wait(120)
            compare(job.path("output.txt"), expected)
            return values
        except Ended as ended:
            too_early = ended
        finally:
            job.drop()
    raise too_early


def training(settings, name, words):
    steps = "200" if settings.is_quick else "400"
    return trained(settings, name, gpt(settings, *words, "--steps", steps, "--log", LOSSES))


def trained(settings, name, argv):
    """A job in PyTorch that writes its losses, once unbroken and once killed and resumed."""
    need(settings, "torch", "criu")
    on_gpu = settings.torch_device == "cuda"
    if on_gpu:
        need(settings, "driver", "checkpoint")
    plain = os.path.join(settings.work, "jobs", f"{name}-plain")
    os.makedirs(plain, exist_ok=True)
    processes.ok(argv, 120, env=settings.env(), cwd=plain)
    with open(os.path.join(plain, LOSSES)) as file:
        expected = file.read()
    job = Job(settings, name, [*argv, *SLOWLY], on_gpu)
    try:
        job.slow_down()
        values = killed_and_resumed(job, LOSSES, 4)
        job.full_speed()
        job.wait(120)
        compare(job.path(LOSSES), expected)
        return values
    finally:
        job.drop()


def killed_and_resumed(job, output, lines):
    """Saved, killed a while later, and started again, some times."""
    job.start().until_answering()
    values = {"stall_s": [], "resumed_in_s": []}
    kills = 1 if job.settings.is_quick else 2
    for _ in range(kills):
        job.until_lines(output, job.lines(output) + lines, 120)
        values["stall_s"].append(round(job.checkpoint()["stall_s"], 4))
        job.until_lines(output, job.lines(output) + lines, 120)
        job.kill()
        job.start().until_answering()
        values["resumed_in_s"].append(job.resumed_s())
    return {**values, "kills": kills, "is_bit_equal": True}


def compare(path, expected):
    with open(path) as file:
        found = file.read()
    if found == expected:
        return
    pairs = zip(found.splitlines(), expected.splitlines())
    for number, (one, other) in enumerate(pairs, 1):
        if one != other:
            raise Fail(f"line {number} is {one!r}, should be {other!r}", {"is_bit_equal": False})
    raise Fail(
        f"{len(found.splitlines())} lines, should be {len(expected.splitlines())}", {"is_bit_equal": False}
    )
