"""A GPU monitor: asks NVML in each step, without ever calling nvmlShutdown, as PyTorch's device_count() does.

    nvml_job.py STEPS [driver | init] [workers] [polls | reopens] [forks] [nvitop]

`driver`: uses the CUDA driver as well; `init`: only initialises it, and has no context. `workers`: two processes, forked once NVML is initialised, do a part of the work.
`polls`: a thread asks NVML all the time as well. `reopens`: it initialises NVML for each question, and shuts it down again;
nothing else has NVML initialised then. `forks`: in each step, a process that it forks initialises the driver, and one that executes
another program does; the file `forked` has both results of the last step. A call that fails ends the program.
Rests after each step as long as the file `slow` is there: longer beside a thread that asks, for tests that take many
snapshots, however long each takes. `nvitop`: asks all that this monitor shows.
"""

import multiprocessing
import os
import sys
import threading
import time
import zlib

import pynvml


def work(step):
    return zlib.crc32(str(step).encode())


def ask():
    device = pynvml.nvmlDeviceGetHandleByIndex(0)
    memory, name = pynvml.nvmlDeviceGetMemoryInfo(device), pynvml.nvmlDeviceGetName(device)
    return f"{pynvml.nvmlDeviceGetCount()} {name} {memory.total}"


def reopen():
    pynvml.nvmlInit()
    answer = ask()
    pynvml.nvmlShutdown()
    return answer


def ask_all():
    import nvitop

    devices = [device.as_snapshot() for device in nvitop.Device.all()]
    return " ".join(f"{one.name} {one.bus_id} {one.memory_total} {one.power_status} {one.clock_infos}" for one in devices)


def poll(question, right):
    try:
        while question() == right:
            pass
    finally:
        os._exit(3)


def start_driver():
    from cuda.bindings import driver

    return int(driver.cuInit(0)[0])


def fork():
    with multiprocessing.get_context("fork").Pool(1) as pool:
        forked = pool.apply(start_driver)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        spawned = pool.apply(start_driver)
    with open("forked.new", "w") as file:
        file.write(f"{forked} {spawned}")
    os.rename("forked.new", "forked")


def main():
    question = reopen if "reopens" in sys.argv else ask_all if "nvitop" in sys.argv else ask
    if question == ask:
        pynvml.nvmlInit()
    right = question()
    if "polls" in sys.argv or "reopens" in sys.argv:
        threading.Thread(target=poll, args=(question, right), daemon=True).start()
    address = None
    if "driver" in sys.argv:
        from cuda.bindings import driver

        driver.cuInit(0)
        driver.cuDevicePrimaryCtxRetain(0)
        driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(0)[1])
        address = driver.cuMemAlloc(4)[1]
    if "init" in sys.argv:
        from cuda.bindings import driver

        assert driver.cuInit(0)[0] == driver.CUresult.CUDA_SUCCESS
    pool = multiprocessing.get_context("fork").Pool(2) if "workers" in sys.argv else None
    total, steps = 0, range(1, int(sys.argv[1]) + 1)
    rest_s = 0.2 if "polls" in sys.argv or "reopens" in sys.argv else 0.04
    worked = pool.imap(work, steps) if pool else map(work, steps)
    for step in steps:
        total = zlib.crc32(str(total).encode(), next(worked))
        if address is not None:
            driver.cuMemsetD32(address, total, 1)
            host = bytearray(4)
            driver.cuMemcpyDtoH(host, address, 4)
            total = int.from_bytes(host, "little")
        if "forks" in sys.argv:
            fork()
        print(f"step {step} checksum {total:08x} {question()}", flush=True)
        if os.path.exists("slow"):
            time.sleep(rest_s)


if __name__ == "__main__":
    main()
