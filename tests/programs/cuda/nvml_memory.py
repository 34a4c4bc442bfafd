"""NVML and the driver tell the same of a device's memory, also after a process with memory on it was killed.

    nvml_memory.py [hold]

`hold`: allocates, says so, and waits to be killed.
"""

import os
import subprocess
import sys
import time

import pynvml
from cuda.bindings import driver

HELD_BYTES = 8 << 20


def checked(result, *values):
    assert result == driver.CUresult.CUDA_SUCCESS, result
    return values[0] if values else None


def start():
    checked(*driver.cuInit(0))
    checked(*driver.cuCtxSetCurrent(checked(*driver.cuDevicePrimaryCtxRetain(0))))


def hold():
    start()
    checked(*driver.cuMemAlloc(HELD_BYTES))
    print("held", flush=True)
    time.sleep(600)


def look(device, what):
    """The free memory, which both know, and what NVML says that this process has."""
    _, free, total = driver.cuMemGetInfo()
    memory = pynvml.nvmlDeviceGetMemoryInfo(device)
    assert (memory.free, memory.total) == (free, total), (what, memory, free, total)
    assert memory.used == total - free, what
    processes = pynvml.nvmlDeviceGetComputeRunningProcesses_v3(device)
    own = sum(process.usedGpuMemory for process in processes if process.pid == os.getpid())
    print(what, free, own)
    return free, own


def main():
    pynvml.nvmlInit()
    device = pynvml.nvmlDeviceGetHandleByIndex(0)
    start()
    before, own = look(device, "before")
    address = checked(*driver.cuMemAlloc(HELD_BYTES))
    free, own_now = look(device, "own")
    assert (free, own_now) == (before - HELD_BYTES, own + HELD_BYTES)
    checked(*driver.cuMemFree(address))
    holder = subprocess.Popen([sys.executable, __file__, "hold"], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        free, own_now = look(device, "other")
        # It has a context too, as large as this process's.
        assert (free, own_now) == (before - HELD_BYTES - own, own)
    finally:
        holder.kill()
        holder.wait()
    # NVML looks first: nobody has counted since the process was killed.
    assert pynvml.nvmlDeviceGetMemoryInfo(device).free == before
    assert look(device, "killed") == (before, own)


hold() if sys.argv[1:] == ["hold"] else main()
