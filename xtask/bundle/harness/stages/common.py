"""What several stages share."""

import os
import socket
import time

from harness import machine, peer, processes
from harness.job import Job, bytes_of, times_of
from harness.records import Fail, Skip

GIGA = 1e9
MEBI = 1 << 20
# Arguments of gpt.py for a model of a few kilobytes.
SMALL = ["--layers", "2", "--width", "64", "--vocabulary", "128", "--length", "32", "--batch", "2"]
# Those that keep it from being done before it is killed, as long as that file is there. The rests of the second half are
# ten times as long.
SLOWLY = ["--rest-ms", "150", "--slow-while", "slow"]


def need(settings, *names):
    """Ends the step as skipped unless all of this is here."""
    facts = settings.facts
    driver, torch, criu = facts.get("driver"), facts.get("torch"), facts["criu"]
    if "driver" in names and not driver:
        raise Skip(f"no CUDA driver: {facts.get('driver_error') or 'libcuda.so.1 was not found'}")
    if "checkpoint" in names and not driver["has_checkpoint"]:
        raise Skip("the driver has no checkpoint API: it needs 570 or newer")
    if "multicast" in names and driver["with_multicast"] < 2:
        raise Skip("needs two GPUs with multicast (NVLink)")
    if "two-gpus" in names and driver["devices"] < 2:
        raise Skip("needs two GPUs")
    if "criu" in names and not criu["works"]:
        raise Skip(f"CRIU does not work here: {criu.get('why_not')}")
    if "torch" in names:
        if not torch:
            raise Skip(f"{settings.python} has no torch: {facts.get('torch_error')}")
        if settings.torch_device == "cuda" and not torch["is_on_gpu"]:
            raise Skip(f"torch {torch['version']} of {settings.python} finds no GPU")
    if "torch-gpu" in names and (settings.torch_device != "cuda" or not torch or not torch["is_on_gpu"]):
        raise Skip("torch has no GPU here")


def gpt(settings, *words):
    """The command of the GPT-like training."""
    device = ["--device", settings.torch_device]
    return [settings.python, settings.at("programs/gpt.py"), *device, *(SMALL if settings.is_quick else []), *words]


def state(settings, size_bytes, rest_us=200):
    """The command of a job with so much device memory, in pieces of 64 MiB or less."""
    pieces = max(8, size_bytes // (64 * MEBI))
    return [settings.at("bin/state"), int(size_bytes), int(pieces), rest_us]


def driver_for_peers(settings):
    return peer.Driver(settings.facts["libcuda"])


def room(settings):
    """Bytes of host memory that are available now."""
    return machine.memory("MemAvailable")


def expect_ok(program, limit_s=120):
    """Has a `state` program check all of its memory."""
    text = program.ask("check", limit_s)
    if text != "ok":
        raise Fail(f"{program.name}: wrong content: {text}")


def until_settled(program, steps=20, limit_s=120):
    """Waits until it has done some steps after whatever happened, and forgets how long it stood still."""
    program.ask("gap", limit_s)
    done = 0
    program.ask("steps", limit_s)
    while done < steps:
        done += int(program.ask("steps", limit_s).split()[0])


def free_port():
    """A port below those that the kernel gives to outgoing connections: nobody has it when the job wants it back."""
    for port in range(20_000 + os.getpid() % 10_000, 31_000):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue
    raise Fail("no port is free")


def resume(job, limit_s=300):
    """Starts a killed job again; seconds until the program answers, from the command on."""
    job.start()
    job.put("gap")
    job.take("gap", limit_s)
    return time.monotonic() - job.begun


def write_log(settings, name, text):
    with open(os.path.join(settings.work, "logs", name), "w") as file:
        file.write(text)


__all__ = ["Fail", "Job", "Skip", "bytes_of", "processes", "times_of"]
