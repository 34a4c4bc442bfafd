"""Kernels written for numba-cuda against the same computed by NumPy on the CPU."""

import math

import numpy as np
from numba import cuda, float32

TILE = 16


@cuda.jit
def add(a, b, c):
    i = cuda.grid(1)
    if i < c.size:
        c[i] = a[i] + b[i]


@cuda.jit
def matmul(a, b, c):
    a_tile = cuda.shared.array((TILE, TILE), float32)
    b_tile = cuda.shared.array((TILE, TILE), float32)
    x, y = cuda.grid(2)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    total = float32(0)
    for start in range(0, a.shape[1], TILE):
        a_tile[ty, tx] = a[y, start + tx] if y < a.shape[0] and start + tx < a.shape[1] else 0
        b_tile[ty, tx] = b[start + ty, x] if start + ty < b.shape[0] and x < b.shape[1] else 0
        cuda.syncthreads()
        for k in range(TILE):
            total += a_tile[ty, k] * b_tile[k, tx]
        cuda.syncthreads()
    if y < c.shape[0] and x < c.shape[1]:
        c[y, x] = total


@cuda.jit
def histogram(values, bins, total):
    i = cuda.grid(1)
    lane_sum = values[i] if i < values.size else 0
    if i < values.size:
        cuda.atomic.add(bins, values[i] % bins.size, 1)
    for offset in (16, 8, 4, 2, 1):
        lane_sum += cuda.shfl_down_sync(0xFFFFFFFF, lane_sum, offset)
    if cuda.laneid == 0:
        cuda.atomic.add(total, 0, lane_sum)


@cuda.jit
def adam(weight, m, v, gradient, rate, step):
    i = cuda.grid(1)
    if i < weight.size:
        m[i] = 0.9 * m[i] + 0.1 * gradient[i]
        v[i] = 0.999 * v[i] + 0.001 * gradient[i] * gradient[i]
        m_hat = m[i] / (1.0 - 0.9**step)
        v_hat = v[i] / (1.0 - 0.999**step)
        weight[i] -= rate * m_hat / (math.sqrt(v_hat) + 1e-8)


@cuda.jit
def walk(states, position, steps):
    """A random walk of each thread, by xorshift64."""
    i = cuda.grid(1)
    if i < states.size:
        state = states[i]
        place = 0
        for _ in range(steps):
            state ^= state << np.uint64(13)
            state ^= state >> np.uint64(7)
            state ^= state << np.uint64(17)
            place += 1 if state & np.uint64(1) else -1
        states[i] = state
        position[i] = place


def check_add(rng):
    a, b = rng.standard_normal((2, 10_007)).astype(np.float32)
    c = np.zeros_like(a)
    add[80, 128](a, b, c)
    np.testing.assert_array_equal(c, a + b)


def check_matmul(rng):
    a = rng.standard_normal((50, 70)).astype(np.float32)
    b = rng.standard_normal((70, 33)).astype(np.float32)
    c = np.zeros((50, 33), np.float32)
    matmul[(3, 4), (TILE, TILE)](a, b, c)
    np.testing.assert_allclose(c, a.astype(np.float64) @ b, rtol=1e-4, atol=1e-4)


def check_histogram(rng):
    values = rng.integers(0, 1000, 5000).astype(np.int32)
    bins, total = np.zeros(17, np.int32), np.zeros(1, np.int32)
    histogram[40, 128](values, bins, total)
    np.testing.assert_array_equal(bins, np.bincount(values % 17, minlength=17))
    assert total[0] == values.sum(), (total[0], values.sum())


def check_adam(rng):
    weight, gradient = rng.standard_normal((2, 3000))
    expected = weight.copy()
    m, v = np.zeros_like(weight), np.zeros_like(weight)
    device = [cuda.to_device(array) for array in (weight, m, v, gradient)]
    for step in range(1, 11):
        adam[24, 128](*device, 0.01, step)
        m = 0.9 * m + 0.1 * gradient
        v = 0.999 * v + 0.001 * gradient * gradient
        expected -= 0.01 * (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.999**step)) + 1e-8)
    np.testing.assert_allclose(device[0].copy_to_host(), expected, rtol=1e-12)


def check_walk(rng):
    states = rng.integers(1, 2**63, 500, dtype=np.uint64)
    position = np.zeros(500, np.int64)
    expected_states, expected = states.copy(), np.zeros(500, np.int64)
    for _ in range(200):
        expected_states ^= expected_states << np.uint64(13)
        expected_states ^= expected_states >> np.uint64(7)
        expected_states ^= expected_states << np.uint64(17)
        expected += np.where(expected_states & np.uint64(1), 1, -1)
    walk[4, 128](states, position, 200)
    np.testing.assert_array_equal(states, expected_states)
    np.testing.assert_array_equal(position, expected)


def check_streams(rng):
    """Pinned memory, two streams, an event between them."""
    n = 4096
    host = cuda.pinned_array(n, np.float32)
    host[:] = rng.standard_normal(n)
    first, second = cuda.stream(), cuda.stream()
    a = cuda.to_device(host, stream=first)
    b = cuda.device_array(n, np.float32, stream=first)
    add[32, 128, first](a, a, b)
    done = cuda.event()
    done.record(first)
    done.wait(second)
    add[32, 128, second](b, a, b)
    result = b.copy_to_host(stream=second)
    second.synchronize()
    np.testing.assert_array_equal(result, (host + host) + host)


for check in (check_add, check_matmul, check_histogram, check_adam, check_walk, check_streams):
    check(np.random.default_rng(1))
    print(check.__name__, "ok", flush=True)
