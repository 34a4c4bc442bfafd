"""What docs/resuming.md says of GPUs."""

from harness.claim import BY_ITSELF, NO_PROGRAM, OTHER_DRIVER, OTHER_GPU, without_steps

FILE = "docs/resuming.md"

CLAIMS = without_steps(
    FILE,
    {
        OTHER_GPU: [
            "A job is resumed on the same GPUs, by their UUIDs",
            "others of the same type take their places",
            "The beginning of a UUID is enough",
            "GPUs that are not named stay",
            "two jobs can change places on one machine",
            "The driver wants a GPU of the same type for each GPU",
            "A machine, or a container, with fewer GPUs is refused",
            "`CUDA_VISIBLE_DEVICES` of the resumed job keeps its old value",
            "Restored processes see the new UUIDs",
            "are those of the old GPUs",
            "A map to a GPU that is not there",
            "A part of a map for a GPU on which the snapshot has nothing",
            "from snapshots of the new GPUs",
        ],
        OTHER_DRIVER: ["NVIDIA's driver 580 or newer is needed", "With an older one, the resume is refused"],
        NO_PROGRAM: ["that other programs use is waited for", "the resume ends with the GPU, its free bytes"],
        BY_ITSELF: ["hold no ports or GPUs", "A snapshot that failed to restore in CRIU or on the GPU"],
    },
)

EXEMPT = {
    "leads to an example": ["`--gpu-map` chooses them"],
    "of the command": ["Nothing was started"],
}
