"""What a framework that was built for CUDA does on a machine without a GPU: frameworks.py NAME.

Prints what it finds and each error that it raises. Its work on the CPU goes on.
"""

import sys


def tried(what, function):
    """Prints the result, or the error with its type."""
    try:
        print(what, function())
    except Exception as error:
        print(what, f"raises {type(error).__name__}: {error}")


def torch():
    import torch

    print("torch", torch.__version__, torch.version.cuda)
    tried("is_available", torch.cuda.is_available)
    tried("device_count", torch.cuda.device_count)
    tried("init", torch.cuda.init)
    tried("zeros", lambda: torch.zeros(3, device="cuda"))
    tried("device name", torch.cuda.get_device_name)
    tried("memory", torch.cuda.mem_get_info)
    tried("stream", torch.cuda.Stream)
    tried("pinned", lambda: torch.zeros(3).pin_memory())
    tried("NCCL", torch.cuda.nccl.version)
    tried("sum on the CPU", lambda: torch.arange(10.0).sum())


def cupy():
    import cupy

    print("cupy", cupy.__version__)
    tried("driver", cupy.cuda.runtime.driverGetVersion)
    tried("runtime", cupy.cuda.runtime.runtimeGetVersion)
    tried("devices", cupy.cuda.runtime.getDeviceCount)
    tried("is_available", cupy.cuda.is_available)
    tried("zeros", lambda: cupy.zeros(3))
    tried("memory", lambda: cupy.cuda.alloc(1 << 20))
    tried("pinned", lambda: cupy.cuda.alloc_pinned_memory(1 << 20))


def jax():
    import jax

    print("jax", jax.__version__)
    tried("devices", jax.devices)
    tried("gpu devices", lambda: jax.devices("gpu"))
    tried("cuda devices", lambda: jax.devices("cuda"))
    tried("sum on the CPU", lambda: jax.numpy.arange(10.0).sum())


def numba():
    import numba
    from numba import cuda

    print("numba", numba.__version__)
    tried("is_available", cuda.is_available)
    tried("driver", lambda: cuda.cudadrv.driver.driver.get_version())
    tried("gpus", lambda: len(cuda.gpus))
    tried("detect", cuda.detect)
    tried("array", lambda: cuda.device_array(3))
    tried("pinned", lambda: cuda.pinned_array(3))


def triton():
    import triton
    from triton.backends.nvidia.driver import CudaDriver
    from triton.runtime import driver

    print("triton", triton.__version__)
    tried("is_active", CudaDriver.is_active)
    tried("driver", lambda: type(driver.active).__name__)
    tried("device", lambda: driver.active.get_current_device())
    tried("target", lambda: driver.active.get_current_target())
    tried("utils", lambda: CudaDriver().utils.get_device_properties(0))


{"torch": torch, "cupy": cupy, "jax": jax, "numba": numba, "triton": triton}[sys.argv[1]]()
