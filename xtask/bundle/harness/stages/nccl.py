"""Two ranks by torchrun and NCCL: with a GPU for each, saved, killed and resumed; on one GPU over sockets, refused, and the
job goes on unharmed.

Where trainings run on the CPU, the same with gloo shows that the stage works."""

from harness.stages.common import SLOWLY, SMALL, need
from harness.stages.process import LOSSES, attempted, trained
from harness.stages.torchrun import launched

# Of the small model: a GPU runs the kernels of two processes in turns, and NCCL's wait for each other. An H200 did not
# finish 400 steps of the usual model in two minutes.
STEPS = "60"
TRAININGS = [("all_reduce", []), ("DDP", ["--wrap", "ddp"]), ("FSDP", ["--wrap", "fsdp"])]


def run(settings, records):
    for name, words in TRAININGS:
        records.step(f"two GPUs, {name}", on_two_gpus, settings, name, words, needs_s=30)
    for name, words in TRAININGS:
        records.step(f"two ranks, {name}", by_nccl, settings, name, words, needs_s=45)
    if settings.torch_device == "cpu":
        records.step("two ranks, DDP by gloo", two_ranks, settings, "gloo", ["--wrap", "ddp"], "gloo", needs_s=45)


def on_two_gpus(settings, name, words):
    need(settings, "torch-gpu", "driver", "checkpoint", "criu", "two-gpus")
    argv = launched(settings, "2", "--distributed", "nccl", *SMALL, *words, steps=STEPS)
    return trained(settings, f"two-gpus-{name.lower()}", argv)


def by_nccl(settings, name, words):
    need(settings, "torch-gpu", "driver", "checkpoint", "criu")
    return two_ranks(settings, name, words, "nccl")


def two_ranks(settings, name, words, backend):
    need(settings, "torch", "criu")
    argv = [*launched(settings, "2", "--distributed", backend, "--one-gpu", *SMALL, *words, steps=STEPS), *SLOWLY]
    on_gpu = settings.torch_device == "cuda"
    return attempted(settings, f"two-ranks-{name.lower()}", argv, LOSSES, on_gpu, is_optional=True)
