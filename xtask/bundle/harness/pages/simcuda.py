"""What docs/simcuda.md says of NVIDIA's driver, in the first cells of its table."""

from harness.claim import (
    BOTH_ANSWERS,
    MAPS,
    NO_PROGRAM,
    OTHER_DEVICES,
    OTHER_DRIVER,
    OTHER_GPU,
    OTHER_MACHINE,
    OTHER_MODE,
    REFUSED,
    SEVERAL_GPUS,
    Claim,
    without_steps,
)

FILE = "docs/simcuda.md"

CLAIMS = [
    Claim(FILE, "the child of a fork keeps the driver's descriptors", ("facts: init/",)),
    Claim(FILE, "calls in that child fail", ("facts: init/",)),
    Claim(
        FILE,
        "a restore without enough device memory makes the process unusable",
        ("kill: restore without memory",),
        ("later_error", ">=", 1),
    ),
    Claim(FILE, "they are gone after the driver's checkpoint", ("driver: maps",)),
    Claim(FILE, "programs of NVML alone hold device files", ("programs: NVML alone",)),
    Claim(
        FILE,
        "killing a process that was restored ruins the host",
        ("kill: without checkpoint",),
        ("gpu_works", "==", False),
    ),
    Claim(FILE, "not if it is locked and checkpointed first", ("kill: after lock and checkpoint",)),
    Claim(FILE, "managed memory is refused: the process stays locked", ("facts: checkpoint/",)),
    Claim(FILE, "a process with CUPTI attached is refused", ("frameworks: profiler",), REFUSED),
    Claim(
        FILE,
        "pinned host memory is a shared mapping of `/dev/zero`",
        ("driver: maps of pinned memory",),
        ("zero_mappings", ">=", 1),
    ),
    Claim(
        FILE,
        "a graph that was captured before its memory was unmapped replays",
        ("facts: checkpoint/", "programs: graphs"),
    ),
    Claim(FILE, "a GPU does not run the kernels of two processes in turns any more", ("facts: checkpoint/",)),
    Claim(FILE, "memory of the host from cuMemCreate: of a NUMA node", ("facts: host-vmm/",)),
    Claim(FILE, "memory that came by a descriptor cannot be exported again", ("facts: share/",)),
    Claim(FILE, "the handle of memory that is gone kills the process", ("facts: vmm/",)),
    Claim(FILE, "an imported pool does not allocate", ("facts: pool-ipc/",)),
    Claim(FILE, "cuGetProcAddress: with the per-thread flag", ("facts: entry/",)),
    *without_steps(
        FILE,
        {
            BOTH_ANSWERS: ["the lock fails in a process without a context"],
            MAPS: ["the driver unmaps its address ranges at a checkpoint"],
            "drivers differ: `checkpoint/ipc` of facts accepts all answers": [
                "a process whose memory another one has open by CUDA IPC",
                "One restore of several succeeded",
            ],
            "drivers differ: `checkpoint/managed-memory` of facts accepts both answers": [
                "later checkpoints of the process fail with CUDA_ERROR_UNKNOWN"
            ],
            "`checkpoint/cupti` of facts accepts both answers, and is skipped where the loader finds no CUPTI": [
                "cuCheckpointProcessGetState of the process itself"
            ],
            "drivers differ: checks of `vmm/` of facts accept both answers": [
                "cuMemMap at an address that is not aligned"
            ],
            "drivers differ: `pool-ipc/statistics` of facts accepts both answers": [
                "an imported pool does not say what is used of it"
            ],
            "what makes it hang is not known here": ["a call of the checkpoint API never returns"],
            "no step tells which descriptors these are": [
                "a process with a context has `/dev/nvidia-caps/nvidia-cap1`"
            ],
            "compare `device/torn-down` and `device/persistence` of facts: which of them is skipped depends on the "
            "machine": ["a GPU that no process has open is torn down"],
            "compare `question/ipc-in-a-job` of facts, which needs driver 610 and cuda-checkpoint on the PATH": [
                "from 610 on, memory that processes of such a job share by CUDA IPC is saved",
                "Outside of a job, reports said that the checkpoint is refused",
            ],
            "compare `question/checkpoint-empty` of facts": ["the driver makes contexts again in each cycle"],
            "`question/checkpoint-host-memory` of facts asks the driver, without ckpt-run": [
                "a process with memory of the host from cuMemCreate is checkpointed, and its restore fails"
            ],
            "compare `question/export-after-restore` of facts": ["What was exported can be, also after a restore"],
            "compare `question/nccl-first-calls` of facts": [
                "NCCL connects ranks when they first need it",
                "with NCCL_RUNTIME_CONNECT=0, do not wait",
            ],
            "compare `nccl/` of facts, in which old versions of NCCL skip checks": [
                "ranks make a communicator without one that does not answer",
                "a rank joins a communicator",
                "a window of NCCL is registered by all ranks together",
            ],
            "no step counts what a program has written": ["most of the memory of some programs is never written"],
            NO_PROGRAM: ['"not supported" may last', "a collective on a communicator that is finalized"],
            SEVERAL_GPUS: [
                "pairs name every GPU of the machine, also hidden ones",
                "a process that holds a multicast object is never checkpointed",
                "binding memory to a multicast object, and mapping the object, wait",
                "the second versions of the calls that bind memory",
            ],
            OTHER_GPU: ["a restore takes the GPUs at the same places"],
            OTHER_DRIVER: ["releases: 550 has no calls"],
            OTHER_DEVICES: ["memory of the GPU that is registered with another device"],
            OTHER_MODE: ["on an instance of a GPU in MIG mode the lock succeeds", "under MPS a process is refused"],
            OTHER_MACHINE: ["One restore took 20 s for 37 GB of it"],
        },
    ),
]

EXEMPT = {}
