"""Whole jobs that are saved, killed with SIGKILL and resumed: their output is that of an unbroken run, bit for bit."""

import os

from harness.job import SAVED, Ended
from harness.stages.common import SLOWLY, Fail, Job, Skip, gpt, need, processes

# Rests between two steps, milliseconds: the longer ones for a machine on which a checkpoint takes so long that the job is
# done meanwhile.
RESTS_MS = (25, 100, 400)
LOSSES, OUTPUT = "losses.txt", "output.txt"


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
            values = killed_and_resumed(job, OUTPUT, 5 if name == "mlp" else 2, kills(settings))
            job.wait(120)
            compare(job.path(OUTPUT), expected)
            return values
        except Ended as ended:
            too_early = ended
        finally:
            job.drop()
    raise too_early


def training(settings, name, words):
    steps = "200" if settings.is_quick else "400"
    argv = gpt(settings, *words, "--steps", steps, "--losses", LOSSES)
    return trained(settings, name, argv, times=kills(settings))


def kills(settings):
    return 1 if settings.is_quick else 2


def trained(settings, name, argv, **more):
    """A job in PyTorch that writes its losses."""
    need(settings, "torch", "criu")
    on_gpu = settings.torch_device == "cuda"
    if on_gpu:
        need(settings, "driver", "checkpoint")
    return as_unbroken(settings, name, [*argv, *SLOWLY], LOSSES, on_gpu=on_gpu, **more)


def as_unbroken(settings, name, argv, output=OUTPUT, on_gpu=True, env=None, times=1, is_optional=False):
    """A job that rests after each step as long as the file `slow` is there, killed and resumed: its output is that of
    an unbroken run. `is_optional`: one that fails without ckpt-run too is skipped."""
    expected = unbroken(settings, name, argv, output, env, is_optional)
    job = Job(settings, name, argv, on_gpu, env)
    try:
        job.slow_down()
        values = killed_and_resumed(job, output, 4, times)
        job.full_speed()
        job.wait(120)
        compare(job.path(output), expected)
        return values
    finally:
        job.drop()


def unbroken(settings, name, argv, output, env, is_optional):
    plain = os.path.join(settings.work, "jobs", f"{name}-plain")
    os.makedirs(plain, exist_ok=True)
    code, said = processes.run(argv, 120, env=settings.env(**(env or {})), cwd=plain, apart=True)
    if code:
        raise (Skip if is_optional else Fail)(f"without ckpt-run it ends with {code}: {processes.tail(said)}")
    if output == OUTPUT:
        return said
    with open(os.path.join(plain, output)) as file:
        return file.read()


def attempted(settings, name, argv, output=OUTPUT, on_gpu=True, files=(), is_optional=False, until_allowed=None):
    """A job that may be refused today: what a checkpoint of it says, and whether it ends as an unbroken run either way.
    `files` are there when it starts. `until_allowed` makes it a job that can be saved, and then it has to be."""
    expected = unbroken(settings, name, argv, output, None, is_optional)
    job = Job(settings, name, argv, on_gpu)
    try:
        job.slow_down()
        for file in files:
            open(job.path(file), "w").close()
        job.start().until_answering()
        job.until_lines(output, 4, 120)
        values = job.attempt()
        if until_allowed:
            until_allowed(job)
            job.until_lines(output, job.lines(output) + 4, 120)
            values["outcome_later"] = job.attempt()["outcome"]
        if SAVED in (values["outcome"], values.get("outcome_later")):
            job.until_lines(output, job.lines(output) + 4, 120)
            job.kill()
            job.start().until_answering()
            values["resumed_in_s"] = job.resumed_s()
        job.full_speed()
        job.wait(120)
        compare(job.path(output), expected)
        if until_allowed and values["outcome_later"] != SAVED:
            raise Fail("it is still refused", values)
        return {**values, "is_bit_equal": True}
    finally:
        job.drop()


def killed_and_resumed(job, output, lines, times):
    """Saved, killed a while later, and started again, some times."""
    job.start().until_answering()
    values = {"stall_s": [], "resumed_in_s": []}
    for _ in range(times):
        # What a second checkpoint finds differs from what a resume has left for the first.
        for _ in range(2 if times > 1 else 1):
            job.until_lines(output, job.lines(output) + lines, 120)
            values["stall_s"].append(round(job.checkpoint()["stall_s"], 4))
        job.until_lines(output, job.lines(output) + lines, 120)
        job.kill()
        job.start().until_answering()
        values["resumed_in_s"].append(job.resumed_s())
    return {**values, "kills": times, "is_bit_equal": True}


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
