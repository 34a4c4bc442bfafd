"""What the driver does: the conformance suite with its questions, plain and behind the interposer, and whether CRIU takes
a process that the driver's own checkpoint has taken off the GPU."""

from harness import conformance, peer
from harness.stages.common import (
    Fail,
    Job,
    driver_for_peers,
    expect_ok,
    free_port,
    gpt,
    need,
    processes,
    state,
    until_settled,
    write_log,
)

# After a checkpoint, a GPU does not run the kernels of two processes in turns (docs/measurements.md): ranks on one GPU
# would wait for each other.
BEFORE_ANY_CHECKPOINT = "nccl/"
# These next: the design rests on them.
FIRST = ["question/", "checkpoint/"]
# What is looked for in what ckpt-run says of a process on the GPU.
TOLD = ("private_tables", "remarks")
QUICK = ["question/", "checkpoint/", "entry/", "init/", "vmm/", "host-vmm/", "share/", "pool-ipc/"]
# Those that are run behind the interposer too.
INTERPOSED = ["alloc/", "vmm/", "pointer/", "pool/", "stream/", "copy/", "capture/", "graph/", "checkpoint/"]
QUICK_INTERPOSED = ["vmm/"]


def run(settings, records):
    records.step("doctor", doctor, settings)
    areas = QUICK if settings.is_quick else conformance.areas(settings)
    if BEFORE_ANY_CHECKPOINT in areas:
        areas.remove(BEFORE_ANY_CHECKPOINT)
        records.step(BEFORE_ANY_CHECKPOINT, conformance.area, settings, BEFORE_ANY_CHECKPOINT, needs_s=100)
    records.step("question/", conformance.area, settings, "question/", needs_s=20)
    records.step("driver and CRIU, small program", driver_and_criu, settings, needs_s=20)
    records.step("driver and CRIU, PyTorch", driver_and_criu_torch, settings, needs_s=40)
    records.step("private tables", private_tables, settings, needs_s=40)
    for area in FIRST[1:] + [area for area in areas if area not in FIRST]:
        records.step(area, conformance.area, settings, area, needs_s=5)
    for area in QUICK_INTERPOSED if settings.is_quick else INTERPOSED:
        name = f"{area} behind the interposer"
        records.step(name, conformance.interposed_is_plain, settings, area, needs_s=15)


def doctor(settings):
    write_log(settings, "doctor.txt", settings.facts["doctor"])
    need(settings, "driver")
    return {"driver": settings.facts["driver"], "criu_works": settings.facts["criu"]["works"]}


def round_trip(program):
    """Dump, kill, restore; what each part took."""
    dump = program.dump()
    gap_s = program.gap_s()
    program.kill()
    restore = program.restore()
    until_settled(program, 3)
    return {"stall_s": gap_s, "dump": dump, "restore": restore}


def driver_and_criu(settings):
    need(settings, "driver", "checkpoint", "criu")
    size_bytes = (16 << 20) if settings.is_quick else (1 << 30)
    program = peer.Peer(
        settings, "plain-state", state(settings, size_bytes), driver_for_peers(settings), gently=True
    )
    try:
        until_settled(program)
        addresses = program.ask("addresses")
        values = round_trip(program)
        expect_ok(program)
        if program.ask("addresses") != addresses:
            raise Fail("the addresses have changed")
        return values
    finally:
        program.drop()


def driver_and_criu_torch(settings):
    need(settings, "driver", "checkpoint", "criu", "torch", "torch-gpu")
    program = peer.Peer(settings, "plain-gpt", gpt(settings), driver_for_peers(settings), gently=True)
    try:
        until_settled(program, 3, 120)
        values = round_trip(program)
        losses = program.ask("losses").split()
        again = reference_losses(settings, len(losses))
        if losses != again:
            raise Fail(f"the losses of {len(losses)} steps differ from an unbroken run's")
        return {**values, "steps": len(losses), "is_bit_equal": True}
    finally:
        program.drop()


def reference_losses(settings, steps):
    path = f"{settings.work}/reference.log"
    processes.ok(gpt(settings, "--steps", str(steps), "--losses", path), 120, env=settings.env(), cwd=settings.work)
    with open(path) as file:
        return [line.split()[-1] for line in file]


def private_tables(settings):
    """Which private tables of the driver a training asks for that uses cuBLAS, cuDNN and NCCL, as the interposer sees
    it, and entry points that it does not know."""
    need(settings, "driver", "checkpoint", "criu", "torch", "torch-gpu")
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    job = Job(settings, "tables", gpt(settings, "--with-cudnn", "--distributed", "nccl"), env=ranks)
    try:
        job.start().until_answering()
        until_settled(job, 3, 120)
        saved = job.checkpoint()
        of_all = {name: [one for process in saved["gpu"] for one in process.get(name, [])] for name in TOLD}
        return {"count": len(of_all["private_tables"]), **of_all}
    finally:
        job.drop()

