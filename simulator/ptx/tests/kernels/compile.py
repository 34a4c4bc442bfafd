#!/usr/bin/env python3
"""Compiles the .cu files beside this script to PTX with NVRTC; the results are committed.

usage: compile.py INCLUDE_DIR LIBNVRTC SM...
e.g.   compile.py .../cuda_runtime/include .../libnvrtc.so.12 52 70 90
       compile.py .../cuda_runtime/include .../libnvrtc.so.13 100

No GPU is needed. NVRTC and the headers come with PyPI's nvidia-cuda-nvrtc-cu12 and nvidia-cuda-runtime-cu12.
"""
import ctypes
import pathlib
import sys

include, library, *targets = sys.argv[1:]
nvrtc = ctypes.CDLL(library)
here = pathlib.Path(__file__).parent


def check(code, what):
    if code != 0:
        sys.exit(f"{what}: NVRTC error {code}")


for source in sorted(here.glob("*.cu")):
    for target in targets:
        # Arithmetic on 16-bit numbers begins with sm_53.
        if source.stem == "half" and int(target) < 53:
            continue
        program = ctypes.c_void_p()
        text, name = source.read_bytes(), source.name.encode()
        check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, name, 0, None, None), source.name)
        options = [f"--gpu-architecture=compute_{target}".encode(), f"-I{include}".encode(), b"--std=c++17"]
        code = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        if code != 0:
            size = ctypes.c_size_t()
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            sys.exit(f"{source.name}: {log.value.decode()}")
        size = ctypes.c_size_t()
        check(nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size)), "nvrtcGetPTXSize")
        ptx = ctypes.create_string_buffer(size.value)
        check(nvrtc.nvrtcGetPTX(program, ptx), "nvrtcGetPTX")
        (here / f"{source.stem}.sm_{target}.ptx").write_bytes(ptx.value)
