"""A script of PyTorch in a process that has looked for a GPU and found none: no_device.py SCRIPT ARGUMENTS."""

import runpy
import sys

import torch

assert torch.version.cuda, "PyTorch's CUDA build"
assert not torch.cuda.is_available() and torch.cuda.device_count() == 0
try:
    torch.zeros(1, device="cuda")
    raise SystemExit("there is a GPU")
except RuntimeError as error:
    assert "No CUDA GPUs are available" in str(error), error
with open("/proc/self/maps") as maps:
    assert "/libcuda.so." in maps.read(), "the driver is loaded"
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
