// 16-bit floating-point numbers.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

extern "C" __global__ void half_axpy(const __half *x, __half *y, float a, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = __hfma(__float2half(a), x[i], y[i]);
}

extern "C" __global__ void half2_ops(const __half2 *a, const __half2 *b, __half2 *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = __hadd2(__hmul2(a[i], b[i]), __hsub2(a[i], b[i]));
}

extern "C" __global__ void bf16_round_trip(const float *in, __nv_bfloat16 *narrow, float *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    narrow[i] = __float2bfloat16(in[i]);
    out[i] = __bfloat162float(narrow[i]) + __half2float(__float2half_rn(in[i]));
}

extern "C" __global__ void half_compare(const __half *a, const __half *b, int *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = __hlt(a[i], b[i]) | __heq(a[i], b[i]) << 1 | __hgtu(a[i], b[i]) << 2 | __hisnan(a[i]) << 3;
}
