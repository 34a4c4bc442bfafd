/* Allocates and frees in stream order all the time, on two streams, with some memory that lives for many steps. */
#include "job.h"

CUresult cuMemAllocAsync(CUdeviceptr *address, size_t bytes, CUstream stream);
CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream);
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream);
CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream stream);
CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream stream);

enum { LIVING = 8, COUNT = 128, BYTES = COUNT * 4 };

int main(int argc, char **argv) {
    struct job job = job_start(argc, argv);
    CUdeviceptr living[LIVING], passing;
    CUstream first, second;
    CUevent ready, read;
    uint64_t sum = 0;
    uint32_t words[COUNT];
    CHECK(cuStreamCreate(&first, STREAM_NON_BLOCKING));
    CHECK(cuStreamCreate(&second, STREAM_NON_BLOCKING));
    CHECK(cuEventCreate(&ready, 0));
    CHECK(cuEventCreate(&read, 0));
    for (unsigned i = 0; i < LIVING; i++) {
        CHECK(cuMemAllocAsync(&living[i], BYTES, first));
        CHECK(cuMemsetD32Async(living[i], i, COUNT, first));
    }
    for (unsigned step = 1; step <= job.steps; step++) {
        CUdeviceptr oldest = living[step % LIVING], youngest;
        /* The second stream uses what the first one has allocated, and frees it. */
        CHECK(cuMemAllocAsync(&passing, BYTES, first));
        CHECK(cuMemcpyDtoDAsync_v2(passing, oldest, BYTES, first));
        CHECK(cuEventRecord(ready, first));
        CHECK(cuStreamWaitEvent(second, ready, 0));
        job_mix(&job, passing, COUNT, step, second);
        CHECK(cuMemAllocAsync(&youngest, BYTES, second));
        CHECK(cuMemcpyDtoDAsync_v2(youngest, passing, BYTES, second));
        CHECK(cuMemFreeAsync(passing, second));
        CHECK(cuMemcpyDtoHAsync_v2(words, youngest, BYTES, second));
        CHECK(cuEventRecord(read, second));
        CHECK(cuMemFreeAsync(oldest, first));
        CHECK(cuStreamWaitEvent(first, read, 0));
        living[step % LIVING] = youngest;
        CHECK(cuStreamSynchronize(second));
        sum = job_hash(sum, words, COUNT);
        job_line(step, sum);
    }
    return 0;
}
