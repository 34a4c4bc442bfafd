// What the language has beyond arithmetic: switches, structs, recursion, pointers to functions, constants, printf.

extern "C" __device__ void __assertfail(const char *message, const char *file, unsigned int line,
                                        const char *function, size_t size);

#define ASSERT(condition) ((condition) ? (void)0 : __assertfail(#condition, "language.cu", __LINE__, __func__, 1))

__device__ int classify(int value) {
    switch (value) {
    case 0: return 100;
    case 1: return 7 * value;
    case 2: return -value;
    case 3: return value << 4;
    case 4: return value ^ 0x55;
    case 5: return value * value;
    case 6: return 1234;
    case 7: return ~value;
    case 8: return value % 3;
    default: return -1;
    }
}

extern "C" __global__ void switches(const int *in, int *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    int total = 0;
    for (int round = 0; round < in[i]; round++) {
        if (round % 3 == 1) continue;
        total += classify(round);
        if (total > 5000) break;
    }
    out[i] = total;
}

struct Particle {
    float position[3], velocity[3];
    char kind;
    double mass;
};

struct Settings {
    float step;
    int count;
    short flags[5];
};

extern "C" __global__ void particles(Particle *all, Settings settings) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= settings.count) return;
    Particle p = all[i];
    for (int d = 0; d < 3; d++) p.position[d] += settings.step * p.velocity[d];
    p.kind += settings.flags[i % 5];
    p.mass = p.mass / 3.0 + i;
    all[i] = p;
}

__device__ __noinline__ unsigned long long fibonacci(unsigned int n) {
    return n < 2 ? n : fibonacci(n - 1) + fibonacci(n - 2);
}

extern "C" __global__ void recursion(unsigned long long *out) {
    out[threadIdx.x] = fibonacci(threadIdx.x % 16);
}

__device__ __noinline__ float twice(float x) { return 2.0f * x; }
__device__ __noinline__ float square(float x) { return x * x; }
__device__ __noinline__ float negate(float x) { return -x; }

typedef float (*Operation)(float);
__device__ Operation operations[3] = {twice, square, negate};

extern "C" __global__ void indirect(float *values) {
    values[threadIdx.x] = operations[threadIdx.x % 3](values[threadIdx.x]);
}

__constant__ int table[8] = {3, 1, 4, 1, 5, 9, 2, 6};
__device__ int counters[4] = {10, 20, 30, 40};
__device__ int *pointer = &counters[2];

extern "C" __global__ void globals(int *out) {
    int i = threadIdx.x;
    atomicAdd(pointer, table[i % 8]);
    __syncthreads();
    out[i] = table[(i * 3) % 8] + counters[i % 4];
}

extern "C" __global__ void stack_array(int *out, int n) {
    int local[32];
    for (int i = 0; i < n; i++) local[(i * 7) % 32] = i * threadIdx.x;
    int sum = 0;
    for (int i = 0; i < n; i++) sum = sum * 31 + local[i];
    out[threadIdx.x] = sum;
}

extern "C" __global__ void say(int value, double real, const char *text) {
    if (threadIdx.x % 2 == 0)
        printf("thread %d of block %u: %5.2f %s %llx\n", threadIdx.x + value, blockIdx.x, real, "word", 1ull << 40);
}

extern "C" __global__ void check(const int *in) {
    ASSERT(in[threadIdx.x] >= 0);
}
