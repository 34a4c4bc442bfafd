"""A small computation on the GPU by a framework: frameworks.py cupy|jax|triton STEPS.

State stays on the device. Each step prints a checksum of it, in whole numbers: the same in every run. Rests after each step
as long as the file `slow` is there.
"""

import os
import sys
import time

# JAX takes three quarters of the device at its start otherwise: too much to be stored in the time that there is.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.05")

COUNT, FACTOR, REST_S = 4096, 1664525, 0.04


def of_cupy():
    import cupy

    mix = cupy.ElementwiseKernel("uint32 x, uint32 salt", "uint32 y", f"y = x * {FACTOR}u + (salt ^ (unsigned)i)", "mix")
    state = cupy.ones(COUNT, cupy.uint32)

    def step(number):
        mix(state, cupy.uint32(number), state)
        return int(state.sum(dtype=cupy.uint64)) & 0xFFFFFFFF

    return step


def of_jax():
    import jax
    import jax.numpy as jnp

    assert jax.devices()[0].platform == "gpu", jax.devices()

    @jax.jit
    def mix(state, salt):
        state = state * jnp.uint32(FACTOR) + (salt ^ jnp.arange(COUNT, dtype=jnp.uint32))
        return state, state.sum(dtype=jnp.uint32)

    state = jnp.ones(COUNT, jnp.uint32)

    def step(number):
        nonlocal state
        state, total = mix(state, jnp.uint32(number))
        return int(total)

    return step


def of_triton():
    import torch
    import triton
    import triton.language as tl

    # For the kernel, which finds only names of its module.
    globals().update(triton=triton, tl=tl)
    state = torch.ones(COUNT, dtype=torch.int32, device="cuda")
    mix = triton.jit(mixed)

    def step(number):
        mix[(COUNT // 256,)](state, number, FACTOR, 256)
        return int(state.to(torch.int64).sum()) & 0xFFFFFFFF

    return step


def mixed(state, salt, FACTOR: "tl.constexpr", BLOCK: "tl.constexpr"):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(state + at, tl.load(state + at) * FACTOR + (salt ^ at))


step = {"cupy": of_cupy, "jax": of_jax, "triton": of_triton}[sys.argv[1]]()
steps = int(sys.argv[2])
for number in range(1, steps + 1):
    print(f"step {number} checksum {step(number):08x}", flush=True)
    if os.path.exists("slow"):
        time.sleep(REST_S if number <= steps / 2 else 10 * REST_S)
