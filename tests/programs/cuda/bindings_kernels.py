"""CUDA C compiled by NVRTC and run through cuda-bindings' driver module, against NumPy on the CPU."""

import ctypes

import numpy as np
from cuda.bindings import driver, nvrtc

SOURCE = rb"""
extern "C" __global__ void add(const float* a, const float* b, float* c, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) c[i] = a[i] + b[i];
}

extern "C" __global__ void matmul(const float* a, const float* b, float* c, int rows, int cols, int inner) {
    __shared__ float as[16][16], bs[16][16];
    int row = blockIdx.y * 16 + threadIdx.y, col = blockIdx.x * 16 + threadIdx.x;
    float sum = 0;
    for (int start = 0; start < inner; start += 16) {
        as[threadIdx.y][threadIdx.x] = row < rows && start + threadIdx.x < inner ? a[row * inner + start + threadIdx.x] : 0;
        bs[threadIdx.y][threadIdx.x] = start + threadIdx.y < inner && col < cols ? b[(start + threadIdx.y) * cols + col] : 0;
        __syncthreads();
        for (int k = 0; k < 16; k++) sum += as[threadIdx.y][k] * bs[k][threadIdx.x];
        __syncthreads();
    }
    if (row < rows && col < cols) c[row * cols + col] = sum;
}

__device__ unsigned long long total;

extern "C" __global__ void reduce(const unsigned* values, int n) {
    extern __shared__ unsigned long long partial[];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    partial[threadIdx.x] = i < n ? values[i] : 0;
    __syncthreads();
    for (int width = blockDim.x / 2; width > 0; width /= 2) {
        if (threadIdx.x < width) partial[threadIdx.x] += partial[threadIdx.x + width];
        __syncthreads();
    }
    if (threadIdx.x == 0) atomicAdd(&total, partial[0]);
}

extern "C" __global__ void adam(double* w, double* m, double* v, const double* g, int n, double rate, double s1, double s2) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    m[i] = 0.9 * m[i] + 0.1 * g[i];
    v[i] = 0.999 * v[i] + 0.001 * g[i] * g[i];
    w[i] -= rate * (m[i] * s1) / (sqrt(v[i] * s2) + 1e-8);
}

extern "C" __global__ void walk(unsigned long long* states, long long* position, int n, int steps) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    unsigned long long s = states[i];
    long long place = 0;
    for (int k = 0; k < steps; k++) {
        s ^= s << 13; s ^= s >> 7; s ^= s << 17;
        place += s & 1 ? 1 : -1;
    }
    states[i] = s;
    position[i] = place;
}
"""


def check(result):
    """Takes the error off a call's result; the rest is one value, several or none."""
    error, *values = result
    if error.value != 0:
        raise RuntimeError(f"{error!r}")
    return values[0] if len(values) == 1 else values


def compile_ptx():
    program = check(nvrtc.nvrtcCreateProgram(SOURCE, b"kernels.cu", 0, [], []))
    options = [b"--gpu-architecture=compute_90"]
    check(nvrtc.nvrtcCompileProgram(program, len(options), options))
    ptx = b" " * check(nvrtc.nvrtcGetPTXSize(program))
    check(nvrtc.nvrtcGetPTX(program, ptx))
    return ptx


class Device:
    def __init__(self):
        check(driver.cuInit(0))
        self.device = check(driver.cuDeviceGet(0))
        self.context = check(driver.cuDevicePrimaryCtxRetain(self.device))
        check(driver.cuCtxSetCurrent(self.context))
        self.stream = check(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
        self.module = check(driver.cuModuleLoadData(compile_ptx()))

    def upload(self, array):
        address = check(driver.cuMemAlloc(array.nbytes))
        check(driver.cuMemcpyHtoDAsync(address, array.ctypes.data, array.nbytes, self.stream))
        return address

    def download(self, address, like):
        result = np.empty_like(like)
        check(driver.cuMemcpyDtoHAsync(result.ctypes.data, address, result.nbytes, self.stream))
        check(driver.cuStreamSynchronize(self.stream))
        check(driver.cuMemFree(address))
        return result

    def launch(self, name, grid, block, *args, shared_bytes=0):
        function = check(driver.cuModuleGetFunction(self.module, name.encode()))
        values, types = [], []
        for arg in args:
            is_pointer = isinstance(arg, driver.CUdeviceptr)
            values.append(int(arg) if is_pointer else arg)
            types.append(ctypes.c_void_p if is_pointer else ctypes.c_double if isinstance(arg, float) else ctypes.c_int)
        grid, block = [(*shape, 1, 1)[:3] for shape in (grid, block)]
        params = (tuple(values), tuple(types))
        check(driver.cuLaunchKernel(function, *grid, *block, shared_bytes, self.stream, params, 0))


def check_add(device, rng):
    a, b = rng.standard_normal((2, 10_007)).astype(np.float32)
    args = [device.upload(array) for array in (a, b, np.zeros_like(a))]
    device.launch("add", (80,), (128,), *args, a.size)
    np.testing.assert_array_equal(device.download(args[2], a), a + b)


def check_matmul(device, rng):
    a = rng.standard_normal((50, 70)).astype(np.float32)
    b = rng.standard_normal((70, 33)).astype(np.float32)
    c = np.zeros((50, 33), np.float32)
    args = [device.upload(array) for array in (a, b, c)]
    device.launch("matmul", (3, 4), (16, 16), *args, 50, 33, 70)
    np.testing.assert_allclose(device.download(args[2], c), a.astype(np.float64) @ b, rtol=1e-4, atol=1e-4)


def check_reduce(device, rng):
    values = rng.integers(0, 2**32, 5000, dtype=np.uint32)
    total, size_bytes = check(driver.cuModuleGetGlobal(device.module, b"total"))
    assert size_bytes == 8
    check(driver.cuMemsetD8Async(total, 0, 8, device.stream))
    device.launch("reduce", (20,), (256,), device.upload(values), values.size, shared_bytes=256 * 8)
    result = np.zeros(1, np.uint64)
    check(driver.cuMemcpyDtoHAsync(result.ctypes.data, total, 8, device.stream))
    check(driver.cuStreamSynchronize(device.stream))
    assert result[0] == values.sum(dtype=np.uint64), (result, values.sum(dtype=np.uint64))


def check_adam(device, rng):
    weight, gradient = rng.standard_normal((2, 3000))
    m, v = np.zeros_like(weight), np.zeros_like(weight)
    args = [device.upload(array) for array in (weight, m, v, gradient)]
    for step in range(1, 11):
        s1, s2 = 1 / (1 - 0.9**step), 1 / (1 - 0.999**step)
        device.launch("adam", (24,), (128,), *args, weight.size, 0.01, s1, s2)
        m = 0.9 * m + 0.1 * gradient
        v = 0.999 * v + 0.001 * gradient * gradient
        weight -= 0.01 * (m * s1) / (np.sqrt(v * s2) + 1e-8)
    np.testing.assert_allclose(device.download(args[0], weight), weight, rtol=1e-12)


def check_walk(device, rng):
    states = rng.integers(1, 2**63, 500, dtype=np.uint64)
    position = np.zeros(500, np.int64)
    args = [device.upload(states), device.upload(position)]
    device.launch("walk", (4,), (128,), *args, 500, 200)
    for _ in range(200):
        states ^= states << np.uint64(13)
        states ^= states >> np.uint64(7)
        states ^= states << np.uint64(17)
        position += np.where(states & np.uint64(1), 1, -1)
    np.testing.assert_array_equal(device.download(args[0], states), states)
    np.testing.assert_array_equal(device.download(args[1], position), position)


def main():
    device = Device()
    for test in (check_add, check_matmul, check_reduce, check_adam, check_walk):
        test(device, np.random.default_rng(1))
        print(test.__name__, "ok", flush=True)
    check(driver.cuModuleUnload(device.module))
    check(driver.cuStreamDestroy(device.stream))
    check(driver.cuDevicePrimaryCtxRelease(device.device))


main()
