"""Prints the functions in NVIDIA's bindings of NVML that a library does not export.

    nvml_names.py LIBRARY

Without those that do not use the driver, that wait for an event, and that are for the hosts of virtual machines.
"""

import ctypes
import re
import sys

import pynvml

ELSEWHERE = re.compile("nvmlErrorString|nvmlSystemGetNVMLVersion|nvml(System)?EventSetWait|.*Vgpu")

with open(pynvml.__file__) as file:
    names = set(re.findall(r'_nvmlGetFunctionPointer\("(\w+)"\)', file.read()))
library = ctypes.CDLL(sys.argv[1])
print(len(names), "names")
for name in sorted(names):
    if not ELSEWHERE.match(name) and not hasattr(library, name):
        print(name)
