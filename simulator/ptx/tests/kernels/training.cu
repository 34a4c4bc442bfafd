// What a small training job runs: elementwise kernels, matrix products, reductions, an optimiser.
#define INFINITY __int_as_float(0x7f800000)

extern "C" __global__ void vector_add(const float *a, const float *b, float *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = a[i] + b[i];
}

constexpr int TILE = 16;

extern "C" __global__ void matmul(const float *a, const float *b, float *c, int m, int n, int k) {
    __shared__ float tile_a[TILE][TILE], tile_b[TILE][TILE + 1];
    int row = blockIdx.y * TILE + threadIdx.y, column = blockIdx.x * TILE + threadIdx.x;
    float sum = 0.0f;
    for (int start = 0; start < k; start += TILE) {
        int across = start + threadIdx.x, down = start + threadIdx.y;
        tile_a[threadIdx.y][threadIdx.x] = row < m && across < k ? a[row * k + across] : 0.0f;
        tile_b[threadIdx.y][threadIdx.x] = down < k && column < n ? b[down * n + column] : 0.0f;
        __syncthreads();
        for (int i = 0; i < TILE; i++) sum = fmaf(tile_a[threadIdx.y][i], tile_b[i][threadIdx.x], sum);
        __syncthreads();
    }
    if (row < m && column < n) c[row * n + column] = sum;
}

__device__ float warp_sum(float value) {
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_down_sync(0xffffffff, value, offset);
    return value;
}

__device__ unsigned int blocks_done;

// Sums to out[0]; out[1] receives the number of blocks from whichever finishes last.
extern "C" __global__ void reduce_sum(const float *in, float *out, int n) {
    __shared__ float sums[32];
    float sum = 0.0f;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) sum += in[i];
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x < 32) {
        sum = warp_sum(threadIdx.x < (blockDim.x + 31) / 32 ? sums[threadIdx.x] : 0.0f);
        if (threadIdx.x == 0) {
            atomicAdd(out, sum);
            __threadfence();
            if (atomicInc(&blocks_done, gridDim.x - 1) == gridDim.x - 1) out[1] = gridDim.x;
        }
    }
}

extern "C" __global__ void adam(float *w, const float *g, float *m, float *v, int n, float rate, float beta1,
                                float beta2, float epsilon, int step) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    m[i] = beta1 * m[i] + (1.0f - beta1) * g[i];
    v[i] = beta2 * v[i] + (1.0f - beta2) * g[i] * g[i];
    float m_hat = m[i] / (1.0f - powf(beta1, step)), v_hat = v[i] / (1.0f - powf(beta2, step));
    w[i] -= rate * m_hat / (sqrtf(v_hat) + epsilon);
}

// One row per block.
extern "C" __global__ void softmax(const float *in, float *out, int columns) {
    extern __shared__ float scratch[];
    const float *row = in + (size_t)blockIdx.x * columns;
    float most = -INFINITY;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) most = fmaxf(most, row[i]);
    scratch[threadIdx.x] = most;
    __syncthreads();
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) scratch[threadIdx.x] = fmaxf(scratch[threadIdx.x], scratch[threadIdx.x + half]);
        __syncthreads();
    }
    most = scratch[0];
    __syncthreads();
    float sum = 0.0f;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) sum += expf(row[i] - most);
    scratch[threadIdx.x] = sum;
    __syncthreads();
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) scratch[threadIdx.x] += scratch[threadIdx.x + half];
        __syncthreads();
    }
    for (int i = threadIdx.x; i < columns; i += blockDim.x)
        out[(size_t)blockIdx.x * columns + i] = __expf(row[i] - most) / scratch[0];
}
