"""A claim of README.md and docs/, and what several pages share."""

from collections import namedtuple

# `steps`: "STAGE: STEP", where `*` stands for any text. `value`: the name of a value that these steps measure, a
# relation and what is claimed; without it, a step that passes shows the claim. `why`: there are no steps.
Claim = namedtuple("Claim", "file text steps value why", defaults=((), None, ""))

PROGRAMS = tuple(
    f"programs: {name}" for name in ("graphs", "memory of graphs", "pools", "virtual memory", "pinned memory")
)
TRAININGS = ("process: GPT in bf16", "torchrun: nccl", "programs: DataLoader workers")
AWAY_AND_BACK = ("memory: away and back, all", "memory: away and back, changed")
TWO_RANKS = ("nccl: two ranks, all_reduce", "nccl: two ranks, DDP", "nccl: two ranks, FSDP")
TWO_GPUS = ("nccl: two GPUs, all_reduce", "nccl: two GPUs, DDP", "nccl: two GPUs, FSDP")
REFUSED_PROGRAMS = ("programs: managed memory", "programs: memory without its owner")

REFUSED = ("outcome", "==", "refused")
BIT_EQUAL = ("is_bit_equal", "==", True)

# Why there are no steps. One that passes whatever the driver does shows nothing.
NO_PROGRAM = "no program of the bundle does that"
NO_HANG = "no program of the bundle hangs"
NO_CONTAINER = "the bundle runs in no container"
NO_MIRROR = "no step sets --mirror, or fills host memory"
NO_LOSS = "nothing here loses the state of a GPU"
STAYED = "compare `device_memory` of `memory: away and back`, which says what stayed"
PROFILED = "`checkpoint/cupti` of facts shows it where the loader finds CUPTI, and is skipped elsewhere"
NOT_SEEN = "no step sees that by itself"
BY_ITSELF = "of ckpt-run alone, whatever the driver does: for tests on the simulated driver"
MEASURED = "a number of one machine: compare docs/measurements.md"
BOTH_ANSWERS = "drivers differ: `checkpoint/lock-needs-a-context` of facts accepts both answers"
MAPS = "drivers differ: compare what `driver: maps` has logged before, between and after a checkpoint"
SEVERAL_GPUS = "needs several GPUs"
OTHER_GPU = "needs another GPU of the same type"
OTHER_DEVICES = "needs other devices"
OTHER_MODE = "needs a GPU in MIG mode, or MPS"
OTHER_DRIVER = "needs another driver"
OTHER_MACHINE = "needs another machine"


def without_steps(file, texts):
    """Claims that no step can show: their texts by the reason."""
    return [Claim(file, text, why=why) for why, several in texts.items() for text in several]
