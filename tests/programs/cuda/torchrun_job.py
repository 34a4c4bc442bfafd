"""Two ranks whose state is on the GPU, by cuda-bindings, and that exchange it by gloo after each step.

    torchrun --nproc_per_node=2 torchrun_job.py STEPS LOG

Rank 0 appends a line for each step to the log. The job ends early once there is the file `end`.
"""

import os
import sys

import torch
import torch.distributed as dist

from bindings_job import COUNT, Walks, rest


def main():
    steps = int(sys.argv[1])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    log = open(sys.argv[2], "a", buffering=1) if rank == 0 else None
    walks = Walks(1 + rank * COUNT)
    for step in range(1, steps + 1):
        walks.step(step + rank)
        # Of both ranks, so that each one's state depends on the other's.
        states = torch.frombuffer(walks.download(), dtype=torch.int32)
        dist.all_reduce(states)
        walks.upload()
        checksum = states.to(torch.int64).mul(torch.arange(1, COUNT + 1)).sum().item()
        if rank == 0:
            log.write(f"step {step} checksum {checksum}\n")
        rest()
        # Both ranks end after the same step.
        is_told = torch.tensor([int(rank == 0 and os.path.exists("end"))])
        dist.all_reduce(is_told)
        if is_told.item():
            break
    dist.destroy_process_group()


main()
