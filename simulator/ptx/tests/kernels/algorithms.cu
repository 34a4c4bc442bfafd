// Classic parallel algorithms and random numbers.

// Inclusive prefix sums of blocks of blockDim.x elements.
extern "C" __global__ void prefix_sum(const unsigned int *in, unsigned int *out, int n) {
    extern __shared__ unsigned int sums[];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    sums[threadIdx.x] = i < n ? in[i] : 0;
    __syncthreads();
    for (int distance = 1; distance < blockDim.x; distance *= 2) {
        unsigned int other = threadIdx.x >= distance ? sums[threadIdx.x - distance] : 0;
        __syncthreads();
        sums[threadIdx.x] += other;
        __syncthreads();
    }
    if (i < n) out[i] = sums[threadIdx.x];
}

extern "C" __global__ void bitonic_sort(int *values) {
    __shared__ int local[512];
    int i = threadIdx.x;
    local[i] = values[blockIdx.x * blockDim.x + i];
    __syncthreads();
    for (int size = 2; size <= blockDim.x; size *= 2)
        for (int distance = size / 2; distance > 0; distance /= 2) {
            int other = i ^ distance;
            if (other > i) {
                bool up = (i & size) == 0;
                if ((local[i] > local[other]) == up) {
                    int swapped = local[i];
                    local[i] = local[other];
                    local[other] = swapped;
                }
            }
            __syncthreads();
        }
    values[blockIdx.x * blockDim.x + i] = local[i];
}

// A step of +1 or -1 per bit of Philox 4x32-10 numbers.
extern "C" __global__ void philox_walk(int *position, unsigned int seed, int rounds) {
    unsigned int thread = blockIdx.x * blockDim.x + threadIdx.x;
    int at = 0;
    for (unsigned int round = 0; round < rounds; round++) {
        unsigned int c[4] = {round, thread, 0, 0}, key[2] = {seed, 0x12345678u};
        for (int i = 0; i < 10; i++) {
            unsigned int high0 = __umulhi(0xD2511F53u, c[0]), low0 = 0xD2511F53u * c[0];
            unsigned int high1 = __umulhi(0xCD9E8D57u, c[2]), low1 = 0xCD9E8D57u * c[2];
            unsigned int next[4] = {high1 ^ c[1] ^ key[0], low1, high0 ^ c[3] ^ key[1], low0};
            for (int j = 0; j < 4; j++) c[j] = next[j];
            key[0] += 0x9E3779B9u;
            key[1] += 0xBB67AE85u;
        }
        for (int j = 0; j < 4; j++) at += 2 * __popc(c[j]) - 32;
    }
    position[thread] = at;
}

extern "C" __global__ void xorshift(unsigned long long *state, int steps) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    unsigned long long x = state[i];
    while (steps-- > 0) {
        x ^= x >> 12;
        x ^= x << 25;
        x ^= x >> 27;
    }
    state[i] = x * 0x2545F4914F6CDD1Dull;
}

// A histogram in shared memory, joined in global memory.
extern "C" __global__ void histogram(const unsigned char *data, unsigned int *bins, int n) {
    __shared__ unsigned int local[256];
    for (int i = threadIdx.x; i < 256; i += blockDim.x) local[i] = 0;
    __syncthreads();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        atomicAdd(&local[data[i]], 1u);
    __syncthreads();
    for (int i = threadIdx.x; i < 256; i += blockDim.x) atomicAdd(&bins[i], local[i]);
}
