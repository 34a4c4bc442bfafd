"""A GPU monitor: asks NVML in each step, without ever calling nvmlShutdown, as PyTorch's device_count() does.

    nvml_job.py STEPS [driver] [workers]

`driver`: uses the CUDA driver as well. `workers`: two processes, forked once NVML is initialised, do a part of the work.
Rests after each step as long as the file `slow` is there.
"""

import multiprocessing
import os
import sys
import time
import zlib

import pynvml


def work(step):
    return zlib.crc32(str(step).encode())


def main():
    pynvml.nvmlInit()
    device = pynvml.nvmlDeviceGetHandleByIndex(0)
    address = None
    if "driver" in sys.argv:
        from cuda.bindings import driver

        driver.cuInit(0)
        driver.cuDevicePrimaryCtxRetain(0)
        driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(0)[1])
        address = driver.cuMemAlloc(4)[1]
    pool = multiprocessing.get_context("fork").Pool(2) if "workers" in sys.argv else None
    total, steps = 0, range(1, int(sys.argv[1]) + 1)
    worked = pool.imap(work, steps) if pool else map(work, steps)
    for step in steps:
        total = zlib.crc32(str(total).encode(), next(worked))
        if address is not None:
            driver.cuMemsetD32(address, total, 1)
            host = bytearray(4)
            driver.cuMemcpyDtoH(host, address, 4)
            total = int.from_bytes(host, "little")
        memory = pynvml.nvmlDeviceGetMemoryInfo(device)
        name, count = pynvml.nvmlDeviceGetName(device), pynvml.nvmlDeviceGetCount()
        print(f"step {step} checksum {total:08x} {count} {name} {memory.total}", flush=True)
        if os.path.exists("slow"):
            time.sleep(0.015)


main()
