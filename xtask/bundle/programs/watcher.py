"""A program that looks at GPUs and computes on the CPU: watcher.py nvml|hidden STEPS.

`nvml`: asks NVML in each step, as monitors do. `hidden`: has no visible GPU. Rests after each step as long as the file
`slow` is there.
"""

import ctypes
import os
import sys
import time
import zlib

REST_S = 0.04


def nvml():
    library = ctypes.CDLL("libnvidia-ml.so.1")
    device, count = ctypes.c_void_p(), ctypes.c_uint()
    assert library.nvmlInit_v2() == 0, "nvmlInit"
    assert library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)) == 0, "a device"

    def ask():
        memory = (ctypes.c_ulonglong * 3)()
        results = library.nvmlDeviceGetMemoryInfo(device, memory), library.nvmlDeviceGetCount_v2(ctypes.byref(count))
        return f"{results} {count.value} {memory[0]}"

    return ask


def hidden():
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # The driver reads the C library's environment.
    library = ctypes.CDLL("libcuda.so.1")
    count = ctypes.c_int(-1)
    return lambda: f"{library.cuInit(0)} {library.cuDeviceGetCount(ctypes.byref(count))} {count.value}"


ask = {"nvml": nvml, "hidden": hidden}[sys.argv[1]]()
total = 0
steps = int(sys.argv[2])
for step in range(1, steps + 1):
    total = zlib.crc32(str(step).encode(), total)
    print(f"step {step} checksum {total:08x} {ask()}", flush=True)
    if os.path.exists("slow"):
        time.sleep(REST_S if step <= steps / 2 else 10 * REST_S)
