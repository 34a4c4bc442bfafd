// Library functions that expand to long sequences of PTX: divisions, roots, transcendental functions.

extern "C" __global__ void doubles(const double *in, double *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    double x = in[i];
    double *row = out + 8 * i;
    row[0] = sqrt(x);
    row[1] = x / 7.0;
    row[2] = exp(x / 10.0);
    row[3] = log(x);
    row[4] = sin(x);
    row[5] = pow(x, 1.5);
    row[6] = fma(x, x, -x);
    row[7] = floor(x) + rint(x / 2) + fmod(x, 1.25);
}

extern "C" __global__ void floats(const float *in, float *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float x = in[i];
    float *row = out + 8 * i;
    row[0] = sqrtf(x);
    row[1] = x / 7.0f;
    row[2] = expf(x / 10.0f);
    row[3] = logf(x);
    row[4] = sinf(x);
    row[5] = tanhf(x / 50.0f);
    row[6] = rsqrtf(x);
    row[7] = erff(x / 40.0f);
}

extern "C" __global__ void integers(const long long *a, const long long *b, long long *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    long long x = a[i], y = b[i];
    long long *row = out + 10 * i;
    row[0] = x / y;
    row[1] = x % y;
    row[2] = (unsigned long long)x / (unsigned long long)y;
    row[3] = __mul64hi(x, y);
    row[4] = (int)x / ((int)y | 1);
    row[5] = __clzll(x) * 100 + __ffsll(y);
    row[6] = __brevll(x);
    row[7] = __byte_perm((unsigned)x, (unsigned)y, 0x5140);
    row[8] = (unsigned)__funnelshift_l((unsigned)x, (unsigned)y, i & 31);
    row[9] = (long long)(float)x + (long long)(double)y;
}

__device__ __noinline__ unsigned int sum_of(unsigned int value, unsigned int members) {
    unsigned int sum = 0;
    for (int lane = 0; lane < 32; lane++)
        if (members >> lane & 1) sum += __shfl_sync(members, value, lane);
    return sum;
}

extern "C" __global__ void votes(unsigned int *out) {
    int lane = threadIdx.x % 32;
    unsigned int *row = out + 6 * threadIdx.x;
    row[0] = __ballot_sync(0xffffffff, lane % 3 == 0);
    row[1] = __any_sync(0xffffffff, lane == 40) | __all_sync(0xffffffff, lane < 32) << 1;
    row[2] = __shfl_xor_sync(0xffffffff, threadIdx.x, 5);
    row[3] = __shfl_up_sync(0xffffffff, threadIdx.x, 3, 8);
    row[4] = __activemask();
    // Each branch synchronises only those that take it.
    if (lane < 12) row[5] = sum_of(lane, 0xfffu);
    else row[5] = sum_of(lane, ~0xfffu);
}
