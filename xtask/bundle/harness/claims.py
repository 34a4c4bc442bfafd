"""What README.md and docs/ say of GPUs, and which steps show or contradict it.

A test finds each `text` in its file, and each step in the stages. A claim that no step can show says why.
"""

from collections import namedtuple
from fnmatch import fnmatchcase

# `steps`: "STAGE: STEP", where `*` stands for any text. `value`: the name of a value that these steps measure, a
# relation and what is claimed; without it, a step that passes shows the claim. `why`: there are no steps.
Claim = namedtuple("Claim", "file text steps value why", defaults=((), None, ""))

PROGRAMS = tuple(
    f"programs: {name}" for name in ("graphs", "memory of graphs", "pools", "virtual memory", "pinned memory")
)
TRAININGS = ("process: GPT in bf16", "torchrun: nccl", "programs: DataLoader workers")
REFUSED = ("outcome", "==", "refused")
RELATIONS = {">=": lambda a, b: a >= b, "<=": lambda a, b: a <= b, "==": lambda a, b: a == b}

# Steps that pass whatever the driver does show nothing.
BOTH_ANSWERS = "drivers differ: `checkpoint/lock-needs-a-context` of facts accepts both answers"
MAPS = "drivers differ: compare what `driver: maps` has logged before, between and after a checkpoint"

WITHOUT_PROGRAM = [
    "more than four copies of NCCL",
    "shared events (cuIpcGetEventHandle",
    "pools that were exported as other handles than POSIX descriptors",
    "memory imported by cuMemPoolImportPointer whose owner has destroyed the pool",
    "give no device memory back before they are destroyed",
    "memory and semaphores of other APIs",
    "a child that was made by a bare system call",
    "a driver used by a way around the interposer",
    "CU_POINTER_ATTRIBUTE_SYNC_MEMOPS",
    "REUSE_FOLLOW_EVENT_DEPENDENCIES",
    "cuMemFree in a relaxed capture on a full device",
    "an error that kills a context",
    "unused memory held by pools",
    "If another process takes it during a checkpoint",
]
OF_SEVERAL_GPUS = [
    "a multicast object with handles other than POSIX descriptors",
    "a multicast object whose creator has released it or ended",
    "logical endpoints, graphics",
    "applies to a pair of devices, not of contexts",
]

CLAIMS = [
    Claim(
        "README.md",
        "ckpt-run copies device memory, only what has changed, and restores it at the same addresses",
        ("memory: away and back, all", "memory: away and back, changed"),
    ),
    Claim("README.md", "NVIDIA's driver (570 or newer) saves contexts, streams, modules and graphs", PROGRAMS),
    Claim("README.md", "Training jobs work the same way", TRAININGS),
    Claim(
        "README.md",
        "A failed checkpoint does not harm the job",
        ("programs: managed memory", "programs: memory without its owner"),
        REFUSED,
    ),
    Claim(
        "README.md",
        "What cannot be saved is named",
        ("programs: managed memory", "programs: memory without its owner"),
        REFUSED,
    ),
    Claim("README.md", "On a GPU, managed memory", ("programs: managed memory",), REFUSED),
    Claim(
        "README.md",
        "NCCL's ranks are stopped at the same call and saved",
        why="needs two GPUs: ranks on one GPU are refused",
    ),
    Claim("docs/install.md", "NVIDIA's driver 570 or newer", ("facts: driver and CRIU, small program",)),
    Claim("docs/limits.md", "managed memory (cuMemAllocManaged", ("programs: managed memory",), REFUSED),
    Claim(
        "docs/limits.md",
        "an NCCL communicator of more than one rank whose ranks did not stop at the same call",
        why="ranks that never stop at the same call are tests on the simulated driver (tests/programs/cuda/waits.c)",
    ),
    Claim(
        "docs/limits.md",
        "two ranks of NCCL on one GPU",
        ("nccl: two ranks, all_reduce", "nccl: two ranks, DDP", "nccl: two ranks, FSDP"),
        REFUSED,
    ),
    Claim(
        "docs/limits.md",
        "memory from its own VMM calls that it has imported from outside the job",
        why="no program of the bundle does that",
    ),
    Claim(
        "docs/limits.md",
        "memory opened by cuIpcOpenMemHandle whose owner has freed it",
        ("programs: memory without its owner",),
        REFUSED,
    ),
    Claim("docs/limits.md", "CUDA IPC handles", ("programs: shared memory",)),
    Claim(
        "docs/limits.md",
        "descriptors of cuMemExportToShareableHandle",
        ("programs: exported memory", "programs: memory passed by descriptors"),
    ),
    Claim("docs/limits.md", "data of cuMemPoolExportPointer", ("programs: pools that processes share",)),
    Claim(
        "docs/limits.md", "module globals, memory of graphs", ("programs: pinned memory", "programs: memory of graphs")
    ),
    *(Claim("docs/limits.md", text, why="no program of the bundle does that") for text in WITHOUT_PROGRAM),
    *(Claim("docs/limits.md", text, why="needs several GPUs") for text in OF_SEVERAL_GPUS),
    Claim("docs/exit-codes.md", "the job was ended because its GPU state was lost", why="nothing here loses it"),
    Claim("docs/unattended.md", "submitted work to a GPU for that long", why="no program of the bundle hangs"),
    Claim("docs/privileges.md", "A GPU with any of this", why="the bundle runs as root"),
    Claim("docs/design/gpu.md", "The driver's lock fails in a process that has initialised", why=BOTH_ANSWERS),
    Claim("docs/design/gpu.md", "the primary context of a device is retained", ("programs: no context",)),
    Claim(
        "docs/design/gpu.md",
        "A multicast object (NVLS) is one address for memory of several devices",
        ("programs: multicast objects", "programs: multicast objects of processes"),
    ),
    Claim(
        "docs/design/gpu.md",
        "the driver's checkpoint takes NVML's files away as well",
        ("programs: NVML alone", "torchrun: all GPUs"),
    ),
    Claim(
        "docs/design/gpu.md",
        "so that the workers of a DataLoader can be saved",
        ("programs: forked workers", "programs: DataLoader workers", "frameworks: numba, forked workers"),
    ),
    Claim(
        "docs/design/gpu.md",
        "580.159 leaves inaccessible memory in their place",
        why=MAPS,
    ),
    Claim(
        "docs/design/gpu.md",
        "cheap enough to be taken twice",
        ("memory: away and back, all",),
        ("drain_s", "<=", 0.1),
    ),
    Claim(
        "docs/design/gpu.md",
        "The driver checkpoints a process whose memory is held by exported descriptors",
        ("memory: away and back, all", "memory: away and back, changed"),
    ),
    Claim(
        "docs/design/gpu.md",
        "Imported memory cannot be exported again",
        ("driver: export of an imported handle",),
        ("exported_again", "==", False),
    ),
    Claim(
        "docs/design/gpu.md",
        "Killing a process that the driver has restored has hung a host",
        ("kill: without checkpoint",),
        ("gpu_works", "==", False),
    ),
    Claim("docs/design/gpu.md", "lock and checkpoint the driver", ("kill: after lock and checkpoint",)),
    Claim(
        "docs/design/gpu.md",
        "Memory of graphs** is the driver's own, and the driver saves it",
        ("programs: memory of graphs", "frameworks: torch.compile with CUDA graphs"),
    ),
    Claim(
        "docs/design/gpu.md",
        "Programs that manage virtual memory themselves",
        ("programs: virtual memory", "frameworks: expandable_segments"),
    ),
    Claim("docs/design/gpu.md", "Pools** keep the driver's handle", ("programs: pools", "frameworks: cudaMallocAsync")),
    Claim("docs/simcuda.md", "the child of a fork keeps the driver's descriptors", ("facts: init/",)),
    Claim("docs/simcuda.md", "calls in that child fail", ("facts: init/",)),
    Claim("docs/simcuda.md", "the lock fails in a process without a context", why=BOTH_ANSWERS),
    Claim("docs/simcuda.md", "a call of the checkpoint API never returns", why="what makes it hang is not known here"),
    Claim("docs/simcuda.md", "the driver unmaps its address ranges at a checkpoint", why=MAPS),
    Claim(
        "docs/simcuda.md",
        "a restore without enough device memory makes the process unusable",
        ("kill: restore without memory",),
        ("later_error", ">=", 1),
    ),
    Claim("docs/simcuda.md", "programs of NVML alone hold device files", ("programs: NVML alone",)),
    Claim(
        "docs/simcuda.md",
        "a GPU that no process has open is torn down",
        why="compare `device/torn-down` and `device/persistence` of facts: which of them is skipped depends on the machine",
    ),
    Claim(
        "docs/simcuda.md",
        "killing a process that was restored ruins the host",
        ("kill: without checkpoint",),
        ("gpu_works", "==", False),
    ),
    Claim("docs/simcuda.md", "pairs name every GPU of the machine, also hidden ones", why="needs several GPUs"),
    Claim(
        "docs/simcuda.md",
        "from 610 on, memory that processes of such a job share by CUDA IPC is saved",
        why="compare `question/ipc-in-a-job` of facts, which needs driver 610 and cuda-checkpoint on the PATH",
    ),
    Claim("docs/simcuda.md", "a process with CUPTI attached is refused", ("frameworks: profiler",), REFUSED),
    Claim(
        "docs/simcuda.md",
        "pinned host memory is a shared mapping of `/dev/zero`",
        ("driver: maps of pinned memory",),
        ("zero_mappings", ">=", 1),
    ),
    Claim(
        "docs/simcuda.md",
        "a graph that was captured before its memory was unmapped replays",
        ("facts: checkpoint/", "programs: graphs"),
    ),
    Claim(
        "docs/simcuda.md",
        "the driver makes contexts again in each cycle",
        why="compare `question/checkpoint-empty` of facts",
    ),
    Claim("docs/simcuda.md", "most of the memory of some programs is never written", ("frameworks: JAX",)),
    Claim(
        "docs/simcuda.md",
        "a process with memory of the host from cuMemCreate is checkpointed, and its restore fails",
        why="`question/checkpoint-host-memory` of facts asks the driver, without ckpt-run",
    ),
    Claim("docs/simcuda.md", "memory of the host from cuMemCreate: of a NUMA node", ("facts: host-vmm/",)),
    Claim("docs/simcuda.md", "cuGetProcAddress: with the per-thread flag", ("facts: entry/",)),
    *(
        Claim(
            "docs/measurements.md",
            "capture and copy back at least 95 % of a plain pinned copy",
            ("memory: capture and copy back", "speed: capture and copy back"),
            (value, ">=", 0.95),
        )
        for value in ("capture_ratio", "copyback_ratio")
    ),
    Claim(
        "docs/measurements.md",
        "stall at most a tenth of that of CRIU with the driver's plain checkpoint",
        ("speed: * GB, both", "peers: ckpt-run beside CRIU and driver"),
        ("stall_ratio", "<=", 0.1),
    ),
    Claim(
        "docs/measurements.md",
        "resume at most a third of that of CRIU with the driver's checkpoint",
        ("speed: * GB, both", "peers: ckpt-run beside CRIU and driver"),
        ("resume_ratio", "<=", 1 / 3),
    ),
    Claim(
        "docs/measurements.md",
        "stall at most 2 s more than the copy",
        ("speed: * GB, ckpt-run",),
        ("stall_beyond_copy_s", "<=", 2.0),
    ),
    Claim(
        "docs/measurements.md",
        "training slowed by at most 0.2 % between checkpoints",
        ("speed: steps of a training",),
        ("step_slowdown", "<=", 0.002),
    ),
    Claim("docs/measurements.md", "bit-identical losses after a resume", TRAININGS, ("is_bit_equal", "==", True)),
]


def verdict(claim, results):
    """`shown`, `contradicted` or `not run`, and by what."""
    if not claim.steps:
        return "not run", claim.why
    steps = [(f"{stage}: {step['step']}", step) for stage, result in results.items() for step in result["steps"]]
    found, missing = [], []
    for pattern in claim.steps:
        matching = [(name, step) for name, step in steps if fnmatchcase(name, pattern)]
        for name, step in matching:
            if step["outcome"] == "skip":
                missing.append(f"{name}: {step['text']}")
            else:
                found.append((name, step, holds(claim, step)))
        if not matching:
            missing.append(f"{pattern}: not run")
    against = [f"{name}: {told(claim, step)}" for name, step, is_so in found if is_so is False]
    if against:
        return "contradicted", "; ".join(against)
    missing += [f"{name}: has not measured {claim.value[0]}" for name, _, is_so in found if is_so is None]
    if missing:
        return "not run", "; ".join(missing)
    return "shown", "; ".join(name for name, _, _ in found)


def holds(claim, step):
    """Whether a step that was run shows a claim; `None` if it does not say."""
    if claim.value is None or step["outcome"] == "fail":
        return step["outcome"] == "pass"
    name, relation, wanted = claim.value
    value = step.get("values", {}).get(name)
    return None if value is None else RELATIONS[relation](value, wanted)


def told(claim, step):
    if claim.value and step["outcome"] == "pass":
        return f"{claim.value[0]} is {step['values'][claim.value[0]]}"
    return step["text"][:200]


def judge(results):
    """All claims with their verdicts."""
    judged = []
    for claim in CLAIMS:
        outcome, by = verdict(claim, results)
        value = claim.value and claim.value[0]
        judged.append({"file": claim.file, "claim": claim.text, "value": value, "verdict": outcome, "by": by})
    return judged
