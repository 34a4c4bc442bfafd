"""torchrun with one rank, by gloo and by NCCL, and with as many ranks as there are GPUs: saved, killed, resumed."""

from harness.stages.common import free_port, gpt, need
from harness.stages.process import LOSSES, trained


def run(settings, records):
    for backend in ("gloo", "nccl"):
        records.step(backend, survives, settings, backend, needs_s=30)
    # torchrun itself looks at the GPUs then.
    records.step("all GPUs", survives, settings, "nccl", "gpu", needs_s=30)


def survives(settings, backend, ranks="1"):
    if backend == "nccl":
        need(settings, "torch-gpu")
    return trained(settings, f"torchrun-{backend}-{ranks}", launched(settings, ranks, "--distributed", backend))


def launched(settings, ranks, *words, steps=None):
    """The command of a training by torchrun."""
    launch = [settings.python, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--master_addr=127.0.0.1"]
    # Old versions fail in their handling of the defaults of these two under newer versions of Python.
    launch += ["-r", "1", "-t", "1", "--master_port", str(free_port())]
    steps = steps or ("100" if settings.is_quick else "400")
    return launch + gpt(settings, *words, "--steps", steps, "--losses", LOSSES)[1:]
