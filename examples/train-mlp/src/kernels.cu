// The kernels of train-mlp. kernels.ptx is what NVRTC 12.1 makes of this file:
//   nvrtc --gpu-architecture=compute_60 --fmad=true
// No atomics and a fixed order of every sum: the same steps give the same bits.

constexpr int TILE = 16;

// c[rows x cols] = op(a) * op(b), inner dimension `inner`; a is stored transposed if ta, b if tb.
extern "C" __global__ void matmul(const float* a, const float* b, float* c, int rows, int cols, int inner, int ta, int tb) {
    __shared__ float as[TILE][TILE + 1];
    __shared__ float bs[TILE][TILE + 1];
    int row = blockIdx.y * TILE + threadIdx.y;
    int col = blockIdx.x * TILE + threadIdx.x;
    float sum = 0.0f;
    for (int start = 0; start < inner; start += TILE) {
        int ka = start + threadIdx.x;
        int kb = start + threadIdx.y;
        as[threadIdx.y][threadIdx.x] = row < rows && ka < inner ? (ta ? a[ka * rows + row] : a[row * inner + ka]) : 0.0f;
        bs[threadIdx.y][threadIdx.x] = kb < inner && col < cols ? (tb ? b[col * inner + kb] : b[kb * cols + col]) : 0.0f;
        __syncthreads();
        for (int k = 0; k < TILE; k++) {
            sum += as[threadIdx.y][k] * bs[k][threadIdx.x];
        }
        __syncthreads();
    }
    if (row < rows && col < cols) {
        c[row * cols + col] = sum;
    }
}

// x[rows x cols] += bias, then max(x, 0) if relu.
extern "C" __global__ void add_bias(float* x, const float* bias, int rows, int cols, int relu) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < rows * cols) {
        float value = x[i] + bias[i % cols];
        x[i] = relu && value < 0.0f ? 0.0f : value;
    }
}

// gradient *= (activation > 0)
extern "C" __global__ void relu_backward(float* gradient, const float* activation, int count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count && !(activation[i] > 0.0f)) {
        gradient[i] = 0.0f;
    }
}

// sums[cols] = sum over rows of x[rows x cols]
extern "C" __global__ void sum_rows(const float* x, float* sums, int rows, int cols) {
    int col = blockIdx.x * blockDim.x + threadIdx.x;
    if (col < cols) {
        float sum = 0.0f;
        for (int row = 0; row < rows; row++) {
            sum += x[row * cols + col];
        }
        sums[col] = sum;
    }
}

// Per row: losses[row] = cross entropy of softmax(logits[row]) with labels[row], logits[row] = its gradient / rows.
extern "C" __global__ void softmax_loss(float* logits, const int* labels, float* losses, int rows, int cols) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) {
        return;
    }
    float* x = logits + row * cols;
    float top = x[0];
    for (int i = 1; i < cols; i++) {
        top = fmaxf(top, x[i]);
    }
    float sum = 0.0f;
    for (int i = 0; i < cols; i++) {
        sum += expf(x[i] - top);
    }
    int label = labels[row];
    losses[row] = logf(sum) - (x[label] - top);
    for (int i = 0; i < cols; i++) {
        x[i] = (expf(x[i] - top) / sum - (i == label ? 1.0f : 0.0f)) / rows;
    }
}

// One step of Adam; scale1 = 1 / (1 - beta1^t), scale2 = 1 / (1 - beta2^t).
extern "C" __global__ void adam(float* weight, float* m, float* v, const float* gradient, int count, float rate, float scale1, float scale2) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) {
        float g = gradient[i];
        m[i] = 0.9f * m[i] + 0.1f * g;
        v[i] = 0.999f * v[i] + 0.001f * g * g;
        weight[i] -= rate * (m[i] * scale1) / (sqrtf(v[i] * scale2) + 1e-8f);
    }
}

// A batch of the step: inputs in [-1, 1), the label is which of the first `classes` inputs is the largest.
extern "C" __global__ void make_batch(float* inputs, int* labels, int rows, int cols, int classes, unsigned step) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) {
        return;
    }
    unsigned state = (step * 2654435761u) ^ ((row + 1) * 40503u);
    int label = 0;
    for (int col = 0; col < cols; col++) {
        state = state * 1664525u + 1013904223u;
        unsigned mixed = state ^ (state >> 15);
        mixed *= 2246822519u;
        mixed ^= mixed >> 13;
        float value = (float)(int)mixed * (1.0f / 2147483648.0f);
        inputs[row * cols + col] = value;
        if (col < classes && value > inputs[row * cols + label]) {
            label = col;
        }
    }
    labels[row] = label;
}
