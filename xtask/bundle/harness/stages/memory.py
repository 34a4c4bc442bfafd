"""Device memory that is captured, taken off the GPU and brought back, at the same addresses."""

import json

from harness.stages.common import (
    MEBI,
    Fail,
    Job,
    bytes_of,
    expect_ok,
    need,
    processes,
    resume,
    state,
    times_of,
    until_settled,
)

RATIOS = "cuda::capture::tests::measure::ratios"


def run(settings, records):
    records.step("capture and copy back", ratios, settings, needs_s=20)
    for way in ("all", "changed"):
        records.step(f"away and back, {way}", away_and_back, settings, way, needs_s=20)
    records.step("train-mlp, checkpoints in between", mlp, settings, needs_s=20)


def ratios(settings):
    """Capture, copy back and hash beside what the driver does at its fastest."""
    need(settings, "driver")
    mib = 16 if settings.is_quick else 2048
    env = settings.env(CKPT_TEST_LIBCUDA=settings.facts["libcuda"], CKPT_BENCH_MIB=str(mib))
    argv = [settings.at("bin/interposer-measures"), "--exact", RATIOS, "--ignored", "--nocapture"]
    said = processes.ok(argv, 90, env=env, cwd=settings.work)
    found = [line for line in said.splitlines() if line.startswith("{")]
    if not found:
        raise Fail(f"nothing was measured: {processes.tail(said)}")
    return {**json.loads(found[0]), "mib": mib}


def away_and_back(settings, way):
    """Checkpoints of a job that runs on, then a kill and a resume: content and addresses stay."""
    need(settings, "driver", "checkpoint", "criu")
    size_bytes = (32 if settings.is_quick else 4096) * MEBI
    job = Job(settings, f"state-{way}", state(settings, size_bytes), env={"CKPT_CAPTURE": way})
    try:
        job.start().until_answering()
        until_settled(job)
        addresses = job.ask("addresses")
        for _ in range(3):
            job.gap_s()
            saved = job.checkpoint()
            stall_s = job.gap_s()
            expect_ok(job)
        if bytes_of(saved) < size_bytes * 0.99:
            raise Fail(f"only {bytes_of(saved)} of {size_bytes} bytes were captured")
        memory = job.device_memory()
        job.kill()
        resume_s = resume(job)
        expect_ok(job)
        if job.ask("addresses") != addresses:
            raise Fail("the addresses have changed")
        return {
            "bytes": size_bytes,
            "stall_s": stall_s,
            **times_of(saved),
            "resume_s": resume_s,
            "resumed_in_s": job.resumed_s(),
            "device_memory": memory,
        }
    finally:
        job.drop()


def mlp(settings):
    """The losses of a cudarc program that is saved again and again are those of one that is not."""
    need(settings, "driver", "checkpoint", "criu")
    steps = 60 if settings.is_quick else 200
    words = [settings.at("bin/train-mlp"), "--steps", str(steps)]
    expected = processes.ok(words, 100, env=settings.env(), apart=True)
    job = Job(settings, "mlp-saved", [*words, "--rest-ms", "60"])
    try:
        job.start().until_answering()
        stalls = []
        for count in (steps // 10, steps // 4, steps // 2):
            if stalls and job.process.poll() is not None:
                break  # it is done: the checkpoints before took long
            job.until_lines("output.txt", count)
            stalls.append(job.checkpoint()["stall_s"])
        job.wait(100)
        with open(job.path("output.txt")) as file:
            if file.read() != expected:
                raise Fail("the output differs from an unbroken run's")
        return {"checkpoints": len(stalls), "stall_s": min(stalls), "is_bit_equal": True}
    finally:
        job.drop()

