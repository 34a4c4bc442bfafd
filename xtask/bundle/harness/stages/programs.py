"""Kinds of programs, each killed and resumed: processes that only look at GPUs, workers that are forked, and each kind
of memory and of object of the driver."""

from harness.stages.common import gpt, need
from harness.stages.process import LOSSES, as_unbroken, attempted, trained

# Programs of the driver API, by the step's name.
SAVED = [
    ("no context", "late"),
    ("forked workers", "forked"),
    ("pinned memory", "pinned"),
    ("graphs", "graphs"),
    ("memory of graphs", "graph_memory"),
    ("pools", "pools"),
    ("virtual memory", "vmm"),
    ("shared memory", "shared"),
    ("exported memory", "exported"),
    ("memory passed by descriptors", "exchanged"),
    ("pools that processes share", "shared_pools"),
    ("memory of the host", "hosted"),
    ("memory that comes and goes", "churns"),
]
# Programs of two devices that are reached at one address: with one process, and with two that share the objects.
MULTICAST = [("multicast objects", "1"), ("multicast objects of processes", "2")]
REFUSED = [("managed memory", "managed"), ("memory without its owner", "orphan")]
# At 40 ms each while they are slow, and at 400 ms in the second half: longer than a checkpoint, a kill and a resume take
# on a busy machine.
STEPS = "250"
WATCHERS = [("NVML alone", "nvml"), ("no visible GPU", "hidden")]


def run(settings, records):
    for name, how in WATCHERS:
        argv = [settings.python, settings.at("programs/watcher.py"), how, STEPS]
        records.step(name, saved, settings, how, argv, needs_s=15)
    for name, program in SAVED:
        records.step(name, saved, settings, program, [settings.at(f"bin/{program}"), STEPS], needs_s=15)
    for name, processes in MULTICAST:
        records.step(name, multicast, settings, processes, needs_s=15)
    for name, program in REFUSED:
        records.step(name, refused, settings, program, [settings.at(f"bin/{program}"), STEPS], needs_s=15)
    records.step("DataLoader workers", loader, settings, needs_s=30)


def saved(settings, name, argv):
    need(settings, "driver", "checkpoint", "criu")
    return as_unbroken(settings, name, argv)


def multicast(settings, processes):
    need(settings, "driver", "checkpoint", "multicast", "criu")
    return as_unbroken(settings, f"multicast-{processes}", [settings.at("bin/multicast"), STEPS, processes])


def refused(settings, name, argv):
    """Refused as long as the job has what cannot be saved."""
    need(settings, "driver", "checkpoint", "criu")
    return attempted(settings, name, argv, until_allowed=lambda job: open(job.path("private"), "w").close())


def loader(settings):
    """Workers that live as long as the job, through pinned memory."""
    steps = "100" if settings.is_quick else "400"
    return trained(settings, "loader", gpt(settings, "--workers", "2", "--steps", steps, "--losses", LOSSES))
