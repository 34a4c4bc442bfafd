"""Random walks of many threads by cuda-bindings' driver module, with a line of output for each step.

    bindings_job.py STEPS

The state is on the device only. Needs nothing but cuda-bindings, so that any Python can run it. Rests after each step
as long as the file `slow` is there.
"""

import ctypes
import os
import sys
import time
import zlib

from cuda.bindings import driver

COUNT = 256

# walk(states, n, salt): states[i] goes one step of xorshift32, with the salt added.
PTX = b"""
.version 6.0
.target sm_50
.address_size 64
.visible .entry walk(.param .u64 p0, .param .u32 p1, .param .u32 p2)
{
    .reg .pred %p;
    .reg .b32 %r<9>;
    .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [p0];
    ld.param.u32 %r1, [p1];
    ld.param.u32 %r2, [p2];
    mov.u32 %r3, %ctaid.x;
    mov.u32 %r4, %ntid.x;
    mov.u32 %r5, %tid.x;
    mad.lo.u32 %r3, %r3, %r4, %r5;
    setp.ge.u32 %p, %r3, %r1;
    @%p ret;
    cvta.to.global.u64 %rd2, %rd1;
    mul.wide.u32 %rd3, %r3, 4;
    add.u64 %rd2, %rd2, %rd3;
    ld.global.u32 %r6, [%rd2];
    shl.b32 %r7, %r6, 13;
    xor.b32 %r6, %r6, %r7;
    shr.u32 %r7, %r6, 17;
    xor.b32 %r6, %r6, %r7;
    shl.b32 %r7, %r6, 5;
    xor.b32 %r6, %r6, %r7;
    add.u32 %r6, %r6, %r2;
    st.global.u32 [%rd2], %r6;
    ret;
}
"""


def check(result):
    """Takes the error off a call's result; the rest is one value, several or none."""
    error, *values = result
    if error.value != 0:
        raise RuntimeError(f"{error!r}")
    return values[0] if len(values) == 1 else values


class Walks:
    def __init__(self, seed):
        check(driver.cuInit(0))
        self.context = check(driver.cuDevicePrimaryCtxRetain(check(driver.cuDeviceGet(0))))
        check(driver.cuCtxSetCurrent(self.context))
        self.stream = check(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
        self.module = check(driver.cuModuleLoadData(PTX))
        self.function = check(driver.cuModuleGetFunction(self.module, b"walk"))
        self.host = (ctypes.c_uint32 * COUNT)(*range(seed, seed + COUNT))
        self.states = check(driver.cuMemAlloc(ctypes.sizeof(self.host)))
        self.upload()

    def step(self, salt):
        values, types = (int(self.states), COUNT, salt), (ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32)
        shape = (COUNT // 64, 1, 1, 64, 1, 1)
        check(driver.cuLaunchKernel(self.function, *shape, 0, self.stream, (values, types), 0))

    def upload(self):
        address, size_bytes = ctypes.addressof(self.host), ctypes.sizeof(self.host)
        check(driver.cuMemcpyHtoDAsync(self.states, address, size_bytes, self.stream))
        check(driver.cuStreamSynchronize(self.stream))

    def download(self):
        address, size_bytes = ctypes.addressof(self.host), ctypes.sizeof(self.host)
        check(driver.cuMemcpyDtoHAsync(address, self.states, size_bytes, self.stream))
        check(driver.cuStreamSynchronize(self.stream))
        return self.host


def rest():
    if os.path.exists("slow"):
        time.sleep(0.04)


def main():
    walks, total = Walks(1), 0
    for step in range(1, int(sys.argv[1]) + 1):
        walks.step(step)
        total = zlib.crc32(walks.download(), total)
        print(f"step {step} checksum {total:08x}", flush=True)
        rest()


if __name__ == "__main__":
    main()
