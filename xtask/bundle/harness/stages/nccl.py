"""Two ranks on one GPU by torchrun and NCCL over sockets. They may be refused: then the job goes on unharmed.

Where trainings run on the CPU, the same with gloo shows that the stage works."""

from harness.stages.common import SLOWLY, SMALL, need
from harness.stages.process import LOSSES, attempted
from harness.stages.torchrun import launched

# Of the small model: a GPU runs the kernels of two processes in turns, and NCCL's wait for each other. An H200 did not
# finish 400 steps of the usual model in two minutes.
STEPS = "60"


def run(settings, records):
    for name, words in [("all_reduce", []), ("DDP", ["--wrap", "ddp"]), ("FSDP", ["--wrap", "fsdp"])]:
        records.step(f"two ranks, {name}", by_nccl, settings, name, words, needs_s=45)
    if settings.torch_device == "cpu":
        records.step("two ranks, DDP by gloo", two_ranks, settings, "gloo", ["--wrap", "ddp"], "gloo", needs_s=45)


def by_nccl(settings, name, words):
    need(settings, "torch-gpu", "driver", "checkpoint", "criu")
    return two_ranks(settings, name, words, "nccl")


def two_ranks(settings, name, words, backend):
    need(settings, "torch", "criu")
    argv = [*launched(settings, "2", "--distributed", backend, "--one-gpu", *SMALL, *words, steps=STEPS), *SLOWLY]
    on_gpu = settings.torch_device == "cuda"
    return attempted(settings, f"two-ranks-{name.lower()}", argv, LOSSES, on_gpu, is_optional=True)
