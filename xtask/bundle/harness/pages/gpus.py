"""What docs/gpus.md says."""

from harness.claim import (
    AWAY_AND_BACK,
    BY_ITSELF,
    MEASURED,
    NOT_SEEN,
    NO_CONTAINER,
    NO_HANG,
    NO_LOSS,
    NO_MIRROR,
    NO_PROGRAM,
    OTHER_DEVICES,
    OTHER_DRIVER,
    OTHER_GPU,
    OTHER_MODE,
    PROFILED,
    PROGRAMS,
    REFUSED,
    REFUSED_PROGRAMS,
    SEVERAL_GPUS,
    STAYED,
    TWO_GPUS,
    TWO_RANKS,
    Claim,
    without_steps,
)

FILE = "docs/gpus.md"
FRAMEWORKS = (
    "process: legacy-job",
    "process: GPT in bf16",
    "frameworks: JAX",
    "frameworks: CuPy",
    "frameworks: Triton",
)

CLAIMS = [
    Claim(FILE, "Jobs that use NVIDIA GPUs by CUDA", FRAMEWORKS),
    Claim(FILE, "Nothing in the job is changed", ("process: GPT in bf16", "torchrun: nccl")),
    Claim(FILE, "NVIDIA's driver 570 or newer", ("facts: driver and CRIU, small program",)),
    Claim(FILE, "ckpt-run preloads it into the job", AWAY_AND_BACK),
    Claim(FILE, "Device memory is hashed on the GPU", ("memory: capture and copy back",)),
    Claim(FILE, "What has changed is copied to host memory", AWAY_AND_BACK),
    Claim(FILE, "NVIDIA's driver saves the rest", PROGRAMS),
    Claim(FILE, "CRIU saves the processes", ("process: train-mlp", "process: legacy-job")),
    Claim(FILE, "The job runs.", ("memory: train-mlp, checkpoints in between",)),
    Claim(
        FILE,
        "The pause is about a second for a small process",
        ("memory: train-mlp, checkpoints in between",),
        ("stall_s", "<=", 1.5),
    ),
    *(
        Claim(FILE, text, TWO_GPUS)
        for text in (
            "ranks of NCCL at the same collective",
            "All ranks are one job",
            "They are stopped at the same collective",
        )
    ),
    Claim(FILE, "Each rank needs a GPU of its own", TWO_RANKS, REFUSED),
    Claim(FILE, "Two ranks on one GPU are refused", TWO_RANKS, REFUSED),
    Claim(FILE, "does not run the kernels of two processes in turns any more", ("facts: checkpoint/",)),
    Claim(FILE, "A checkpoint that is refused says which process has what", REFUSED_PROGRAMS, REFUSED),
    Claim(FILE, "managed memory (`cudaMallocManaged`)", ("programs: managed memory",), REFUSED),
    Claim(FILE, "a profiler (CUPTI)", ("frameworks: profiler",), REFUSED),
    *without_steps(
        FILE,
        {
            "of an H100 and an H200: compare docs/measurements.md": ["Jobs on one H100 and one H200 were killed"],
            STAYED: ["all of it stays on the GPU"],
            "compare `stall_best_s` and `durable_s` of speed": ["The snapshot is stored meanwhile"],
            NO_CONTAINER: [
                "the image needs no CUDA toolkit",
                "The container needs the driver's library",
                "In a container or a Slurm job, the limit of the cgroup",
            ],
            "frameworks has JAX take 5 % of the GPU, so that there is time to store it": [
                "JAX takes three quarters of a GPU at its start"
            ],
            PROFILED: ["with driver 580 a process that was profiled cannot be saved any more"],
            MEASURED: [
                "2 s for 25.7 GB that have all changed",
                "A resume of that process takes 3.1 s",
                "adds about 0.35 s to each dump",
                "the interposer takes 0.11 % of the CPU time",
            ],
            NOT_SEEN: ["All processes are stopped between two calls of the driver", "Work on the GPU ends"],
            BY_ITSELF: [
                "ckpt-run keeps a copy of device memory in host memory (the mirror)",
                "shows the mode and what the copy takes",
                "The store needs disk space for the device memory once",
                "It is tried again by itself",
                "names the GPUs of a snapshot, and how much device memory each process has",
                "writes device memory to files for other programs",
            ],
            NO_MIRROR: [
                "Host memory for a copy of the device memory, or less",
                "as much as device memory, without chunks of zeroes",
                "none, once the snapshot is stored",
                "lasts until all that has changed is written to the store",
                "`all` if that takes at most half of the free memory",
                "too little host memory",
            ],
            NO_PROGRAM: [
                "A program that is statically linked, or that clears `LD_PRELOAD`",
                "a process without the interposer that has the GPU open",
                "the job's work on the GPU takes longer than that to end",
                "a resume waits for memory of a GPU",
                "After `--gpu-timeout` the resume ends",
            ],
            SEVERAL_GPUS: [
                "what it chooses",
                "no NVLink multicast, no InfiniBand",
                "TCP only",
                "Several ranks in one process",
                "Ranks that do not come to the same collective within three attempts",
                "The message names the processes and their calls",
                "The usual cause is a rank that waits for another one outside of NCCL",
                "a rank that lets the others wait for 30 s is named",
            ],
            OTHER_DEVICES: ["InfiniBand and other RDMA devices cannot be saved", "GDRCopy, GPUDirect Storage"],
            OTHER_MODE: ["a GPU in MIG mode, MPS"],
            OTHER_DRIVER: ["580 or newer for a resume on other GPUs", "a driver that does not support checkpoints"],
            OTHER_GPU: ["the driver wants a GPU of the same type for each one of the machine"],
            NO_HANG: [
                "`--hang-timeout auto` restarts a job",
                "(5 min) the job is ended",
                "shows the driver's error (Xid)",
            ],
            NO_LOSS: ["a GPU's state could not be put back", "The last snapshot is intact"],
        },
    ),
]

EXEMPT = {
    "a heading": ["**What this rests on"],
    "of the tests": ["Several GPUs, and several machines, were tested", "The measurements are with 580.159"],
    "what to do": [
        "Try a kill of your own job",
        "A job that is started with the environment",
        "Choose how NCCL connects them",
        "For the same reason, do not share a GPU",
        "Run nothing else on these GPUs",
        "Look at `nvidia-smi`",
    ],
    "of the packages": ["`libckpt_interpose.so`, which every package installs", "`ckpt-run config` shows which one"],
    "leads to another page or to a table": [
        "[More numbers]",
        "`--mirror` sets how much",
        "[limits.md](limits.md#state-on-the-gpu) has the whole list",
        "For ranks of NCCL see",
    ],
}
