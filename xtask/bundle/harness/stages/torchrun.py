"""torchrun with one rank, by gloo and by NCCL: saved, killed, resumed."""

from harness.stages.common import free_port, gpt, need
from harness.stages.process import LOSSES, trained


def run(settings, records):
    for backend in ("gloo", "nccl"):
        records.step(backend, survives, settings, backend, needs_s=40)


def survives(settings, backend):
    if backend == "nccl":
        need(settings, "torch-gpu")
    launch = [settings.python, "-m", "torch.distributed.run", "--nproc_per_node=1", "--master_addr=127.0.0.1"]
    # Old versions fail in their handling of the defaults of these two under newer versions of Python.
    launch += ["-r", "1", "-t", "1", "--master_port", str(free_port())]
    steps = "200" if settings.is_quick else "400"
    argv = launch + gpt(settings, "--distributed", backend, "--steps", steps, "--log", LOSSES)[1:]
    return trained(settings, f"torchrun-{backend}", argv)
