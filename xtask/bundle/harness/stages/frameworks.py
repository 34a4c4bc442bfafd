"""Trainings and computations of frameworks, each killed and resumed: what is not installed is skipped."""

import os

from harness.stages.common import SLOWLY, gpt, need
from harness.stages.process import LOSSES, as_unbroken, attempted, trained

ALLOCATORS = [
    ("expandable_segments", "expandable_segments:True"),
    ("cudaMallocAsync", "backend:cudaMallocAsync"),
]
PROFILE = "profile"
# At 40 ms each while they are slow, and at 400 ms in the second half: longer than a checkpoint, a kill and a resume take
# on a busy machine.
STEPS = "250"


def run(settings, records):
    records.step("torch.compile with CUDA graphs", compiled, settings, needs_s=60)
    for name, value in ALLOCATORS:
        records.step(name, allocated, settings, name, value, needs_s=25)
    for name, script, words in [
        ("CuPy", "frameworks.py", ["cupy"]),
        ("JAX", "frameworks.py", ["jax"]),
        ("numba", "numba_job.py", []),
        ("numba, forked workers", "numba_job.py", []),
        ("Triton", "frameworks.py", ["triton"]),
    ]:
        workers = ["2"] if "workers" in name else []
        records.step(name, computed, settings, name, script, words, workers, needs_s=25)
    records.step("profiler", profiled, settings, needs_s=30)


def training(settings, *words):
    steps = "120" if settings.is_quick else "400"
    return gpt(settings, *words, "--steps", steps, "--losses", LOSSES)


def compiled(settings):
    need(settings, "torch-gpu")
    # What is compiled is kept for the run after the first one.
    env = {"TORCHINDUCTOR_CACHE_DIR": os.path.join(settings.work, "inductor")}
    return trained(settings, "compiled", training(settings, "--compile"), env=env, is_optional=True)


def allocated(settings, name, value):
    need(settings, "torch-gpu")
    return trained(settings, name, training(settings), env={"PYTORCH_CUDA_ALLOC_CONF": value})


def computed(settings, name, script, words, workers):
    need(settings, "driver", "checkpoint", "criu")
    argv = [settings.cuda_python, settings.at(f"programs/{script}"), *words, STEPS, *workers]
    return as_unbroken(settings, name.lower().replace(", ", "-").replace(" ", "-"), argv, is_optional=True)


def profiled(settings):
    """Under torch.profiler, which attaches CUPTI."""
    need(settings, "torch-gpu", "driver", "checkpoint", "criu")
    argv = [*training(settings, "--profile-while", PROFILE), *SLOWLY]
    return attempted(settings, "profiled", argv, LOSSES, files=[PROFILE])
