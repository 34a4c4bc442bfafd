"""An optimiser in a numba-cuda kernel, with all its state on the device and a line of output for each step.

    numba_job.py STEPS [WORKERS]

With workers, targets come from so many processes that are forked once the driver has started, as from the workers of a
DataLoader. Rests after each step as long as the file `slow` is there.
"""

import math
import multiprocessing
import os
import sys
import time
import zlib

import numpy as np
from numba import cuda

COUNT = 256


@cuda.jit
def adam(weight, m, v, target, step):
    i = cuda.grid(1)
    if i < weight.size:
        gradient = weight[i] - target[i]
        m[i] = 0.9 * m[i] + 0.1 * gradient
        v[i] = 0.999 * v[i] + 0.001 * gradient * gradient
        m_hat = m[i] / (1.0 - 0.9**step)
        v_hat = v[i] / (1.0 - 0.999**step)
        weight[i] -= 0.01 * m_hat / (math.sqrt(v_hat) + 1e-8)


def load(index):
    """The target of one step."""
    return np.random.default_rng(index).standard_normal(COUNT)


def main():
    rng = np.random.default_rng(1)
    weight, target = (cuda.to_device(array) for array in rng.standard_normal((2, COUNT)))
    m, v = cuda.to_device(np.zeros(COUNT)), cuda.to_device(np.zeros(COUNT))
    total, steps = 0, range(1, int(sys.argv[1]) + 1)
    targets = None
    if len(sys.argv) > 2:
        pool = multiprocessing.get_context("fork").Pool(int(sys.argv[2]))
        targets = pool.imap(load, steps)
    for step in steps:
        if targets:
            target = cuda.to_device(next(targets))
        adam[COUNT // 64, 64](weight, m, v, target, step)
        total = zlib.crc32(weight.copy_to_host(), total)
        print(f"step {step} checksum {total:08x}", flush=True)
        if os.path.exists("slow"):
            time.sleep(0.04 if step <= len(steps) / 2 else 0.4)


main()
