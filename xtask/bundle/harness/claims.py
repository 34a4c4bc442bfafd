"""What README.md and docs/ say of GPUs, and which steps show or contradict it.

A test finds each `text` in its file, and each step in the stages. A claim that no step can show says why.
"""

from fnmatch import fnmatchcase

from harness.claim import (
    AWAY_AND_BACK,
    BIT_EQUAL,
    BOTH_ANSWERS,
    MAPS,
    NO_HANG,
    NO_LOSS,
    PROGRAMS,
    REFUSED,
    REFUSED_PROGRAMS,
    TRAININGS,
    TWO_GPUS,
    Claim,
)
from harness.pages import gpus, limits, resuming, simcuda

RELATIONS = {">=": lambda a, b: a >= b, "<=": lambda a, b: a <= b, "==": lambda a, b: a == b}

CLAIMS = [
    Claim(
        "README.md",
        "ckpt-run copies device memory, only what has changed, and restores it at the same addresses",
        AWAY_AND_BACK,
    ),
    Claim("README.md", "NVIDIA's driver (570 or newer) saves contexts, streams, modules and graphs", PROGRAMS),
    Claim("README.md", "Training jobs work the same way", TRAININGS),
    Claim("README.md", "A failed checkpoint does not harm the job", REFUSED_PROGRAMS, REFUSED),
    Claim("README.md", "What cannot be saved is named", REFUSED_PROGRAMS, REFUSED),
    Claim("README.md", "On a GPU, managed memory", ("programs: managed memory",), REFUSED),
    Claim("README.md", "NCCL's ranks are stopped at the same call and saved", TWO_GPUS),
    Claim("docs/install.md", "NVIDIA's driver 570 or newer", ("facts: driver and CRIU, small program",)),
    Claim("docs/exit-codes.md", "the job was ended because its GPU state was lost", why=NO_LOSS),
    Claim("docs/unattended.md", "submitted work to a GPU for that long", why=NO_HANG),
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
        AWAY_AND_BACK,
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
    Claim("docs/measurements.md", "bit-identical losses after a resume", TRAININGS, BIT_EQUAL),
    *gpus.CLAIMS,
    *limits.CLAIMS,
    *resuming.CLAIMS,
    *simcuda.CLAIMS,
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
