#!/usr/bin/env python3
"""A small training job: a regression on made-up data, on one process or on several.

    python3 train.py --steps 60
    torchrun --nproc_per_node=2 train.py --steps 60 --workers 2

Rank 0 appends one line per step to the log: the number of the step and the mean loss
of all ranks, as a hexadecimal float, so that no digit is lost. Two runs with the same
arguments write the same lines, bit for bit. Runs on the CPU, with PyTorch 1.13 or newer.
"""

import argparse
import os
import random
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

FEATURES = 32


class NoisyWaves(Dataset):
    """Points of a smooth function. The points are fixed; the noise on them is drawn anew each time."""

    def __init__(self, size):
        generator = torch.Generator().manual_seed(20240501)
        self.inputs = torch.randn(size, FEATURES, generator=generator)
        direction = torch.randn(FEATURES, generator=generator) / FEATURES**0.5
        self.targets = torch.sin(self.inputs @ direction).unsqueeze(1)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        noise = 0.05 * torch.randn(FEATURES)
        flip = -1.0 if random.random() < 0.1 else 1.0
        return flip * (self.inputs[index] + noise), flip * self.targets[index]


def build_model(hidden):
    return nn.Sequential(
        nn.Linear(FEATURES, hidden),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(hidden, 1),
    )


def build_loader(args, rank, world_size):
    dataset = NoisyWaves(args.dataset_size)
    sampler = DistributedSampler(dataset, world_size, rank, seed=args.seed, drop_last=True)
    return DataLoader(
        dataset,
        batch_size=args.batch_size,
        sampler=sampler,
        num_workers=args.workers,
        drop_last=True,
    )


def batches(loader):
    """Batches without end: epoch after epoch, each in an order of its own."""
    epoch = 0
    while True:
        loader.sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def train(args, rank, world_size):
    random.seed(args.seed + rank)
    torch.manual_seed(args.seed)
    model = build_model(args.hidden)
    if world_size > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    # From here on each rank draws its own random numbers.
    torch.manual_seed(args.seed + 1000 * (rank + 1))
    source = batches(build_loader(args, rank, world_size))

    log = open(args.log, "a", buffering=1) if rank == 0 else None
    for step in range(1, args.steps + 1):
        inputs, targets = next(source)
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()

        mean = loss.detach().double()
        if world_size > 1:
            dist.all_reduce(mean)
            mean /= world_size
        if rank == 0:
            log.write(f"{step} {mean.item().hex()}\n")
            if step % 10 == 0 or step == args.steps:
                print(f"step {step:5d}  loss {mean.item():.6f}", flush=True)
        if args.slow_while is None or os.path.exists(args.slow_while):
            time.sleep(args.step_ms / 1000)
    if log:
        log.close()


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps to train")
    parser.add_argument("--step-ms", type=float, default=0.0, help="time to sleep after each step")
    parser.add_argument("--slow-while", metavar="FILE", help="sleep only while this file exists")
    parser.add_argument("--workers", type=int, default=0, help="DataLoader workers of each rank")
    # Under torchrun `--losses`: some versions take `--log` for the start of an option of their own, and fail.
    parser.add_argument(
        "--losses", "--log", dest="log", default="losses.txt", help="file that the losses are appended to"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--hidden", type=int, default=64, help="width of the hidden layers")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--dataset-size", type=int, default=1024)
    args = parser.parse_args()
    if args.batch_size * int(os.environ.get("WORLD_SIZE", "1")) > args.dataset_size:
        parser.error("--dataset-size is too small for one batch on every rank")
    return args


def main():
    args = parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    rank = int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        dist.init_process_group("gloo")
    train(args, rank, world_size)
    if world_size > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
