/* Pinned memory of three kinds, events between streams, host functions, a global variable of the module. */
#include "job.h"

CUresult cuMemHostAlloc(void **address, size_t bytes, unsigned flags);
CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *device, void *host, unsigned flags);
CUresult cuMemHostRegister_v2(void *address, size_t bytes, unsigned flags);
CUresult cuMemAllocHost_v2(void **address, size_t bytes);
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, CUstream stream);
CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream stream);
CUresult cuLaunchHostFunc(CUstream stream, void (*function)(void *), void *argument);
CUresult cuEventSynchronize(CUevent event);

enum { COUNT = 128, BYTES = COUNT * 4, DEVICE_MAP = 2 };

static uint32_t *upload, *download, *mapped;
static uint64_t sum;

static void add_download(void *step) {
    sum = job_hash(sum ^ *(unsigned *)step, download, COUNT);
}

static uint32_t *registered(void) {
    void *memory;
    if (posix_memalign(&memory, 4096, 4096) != 0) {
        perror("posix_memalign");
        exit(1);
    }
    CHECK(cuMemHostRegister_v2(memory, 4096, 0));
    return memory;
}

int main(int argc, char **argv) {
    struct job job = job_start(argc, argv);
    CUdeviceptr data = job_alloc(COUNT, 1), mapped_at, total;
    CUstream copies, kernels;
    CUevent uploaded, mixed, down;
    size_t total_bytes;
    uint32_t global;
    upload = registered();
    CHECK(cuMemAllocHost_v2((void **)&download, BYTES));
    CHECK(cuMemHostAlloc((void **)&mapped, BYTES, DEVICE_MAP));
    CHECK(cuMemHostGetDevicePointer_v2(&mapped_at, mapped, 0));
    CHECK(cuModuleGetGlobal_v2(&total, &total_bytes, job.module, "total"));
    CHECK(cuStreamCreate(&copies, STREAM_NON_BLOCKING));
    CHECK(cuStreamCreate(&kernels, STREAM_NON_BLOCKING));
    CHECK(cuEventCreate(&uploaded, 0));
    CHECK(cuEventCreate(&mixed, 0));
    CHECK(cuEventCreate(&down, 0));
    memset(mapped, 0, BYTES);
    for (unsigned step = 1; step <= job.steps; step++) {
        upload[0] = step;
        CHECK(cuMemcpyHtoDAsync_v2(data + step % COUNT * 4, upload, 4, copies));
        CHECK(cuEventRecord(uploaded, copies));
        CHECK(cuStreamWaitEvent(kernels, uploaded, 0));
        job_mix(&job, data, COUNT, step, kernels);
        job_mix(&job, mapped_at, COUNT, step, kernels);
        CHECK(cuEventRecord(mixed, kernels));
        CHECK(cuStreamWaitEvent(copies, mixed, 0));
        CHECK(cuMemcpyDtoHAsync_v2(download, data, BYTES, copies));
        CHECK(cuLaunchHostFunc(copies, add_download, &step));
        CHECK(cuEventRecord(down, copies));
        CHECK(cuEventSynchronize(down));
        CHECK(cuMemcpyDtoH_v2(&global, total, sizeof global));
        job_line(step, job_hash(job_hash(sum, mapped, COUNT), &global, 1));
    }
    return 0;
}
