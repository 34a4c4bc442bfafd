/* Asks again and again what it has been told at its start: what the pointers point to, and what the driver says of
 * them and of everything else that has a handle. Each line has all of it, so that each has to be like the first. */
#include "vmm.h"

typedef struct CUpool_st *CUmemoryPool;
CUresult cuMemAllocPitch_v2(CUdeviceptr *address, size_t *pitch, size_t width, size_t height, unsigned element);
CUresult cuMemAllocAsync(CUdeviceptr *address, size_t bytes, CUstream stream);
CUresult cuMemHostAlloc(void **address, size_t bytes, unsigned flags);
CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *device, void *host, unsigned flags);
CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr address);
CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes);
CUresult cuPointerGetAttributes(unsigned count, const int *attributes, void **values, CUdeviceptr address);
CUresult cuFuncGetAttribute(int *value, int attribute, CUfunction function);
CUresult cuCtxGetCurrent(CUcontext *context);
CUresult cuStreamQuery(CUstream stream);
CUresult cuStreamGetFlags(CUstream stream, unsigned *flags);
CUresult cuStreamGetPriority(CUstream stream, int *priority);
CUresult cuStreamGetCtx(CUstream stream, CUcontext *context);
CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority);
CUresult cuEventQuery(CUevent event);
CUresult cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end);
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active);

enum { REGIONS = 8, DEVICE_MAP = 2 };

struct region {
    const char *name;
    CUdeviceptr address;
    size_t bytes;
};

static struct region regions[REGIONS];

static void fill(unsigned index, const char *name, CUdeviceptr address, size_t bytes) {
    regions[index] = (struct region){name, address, bytes};
    CHECK(cuMemsetD32_v2(address, index + 1, bytes / 4));
    CHECK(cuMemsetD32_v2(address + bytes / 8 * 4, 77 * index, 1));
}

static void allocate(const struct job *job, CUstream stream) {
    CUdeviceptr address;
    CUmemGenericAllocationHandle handle;
    size_t bytes, granule = vmm_granularity_bytes();
    void *host;
    CHECK(cuMemAlloc_v2(&address, 12));
    fill(0, "small", address, 12);
    CHECK(cuMemAlloc_v2(&address, 100000));
    fill(1, "odd", address, 100000);
    CHECK(cuMemAlloc_v2(&address, granule + 4096));
    fill(2, "large", address, granule + 4096);
    CHECK(cuMemAllocPitch_v2(&address, &bytes, 1000, 7, 4));
    fill(3, "pitched", address, 7 * bytes);
    CHECK(cuMemAddressReserve(&address, granule, 0, 0, 0));
    CHECK(cuMemCreate(&handle, granule, &vmm_prop, 0));
    vmm_map(address, granule, handle);
    fill(4, "mapped", address, granule);
    CHECK(cuMemAllocAsync(&address, 5000, stream));
    CHECK(cuStreamSynchronize(stream));
    fill(5, "pooled", address, 5000);
    CHECK(cuModuleGetGlobal_v2(&address, &bytes, job->module, "total"));
    fill(6, "global", address, bytes);
    CHECK(cuMemHostAlloc(&host, 8192, DEVICE_MAP));
    CHECK(cuMemHostGetDevicePointer_v2(&address, host, 0));
    fill(7, "pinned", address, 8192);
}

/* What is asked of a pointer in its middle, and a hash of the bytes. */
static void region_line(const struct region *region) {
    enum { CONTEXT, MEMORY_TYPE, DEVICE_POINTER, BUFFER_ID, IS_MANAGED, ORDINAL, START, BYTES, POOL, ASKED };
    static const int attributes[ASKED] = {1, 2, 3, 7, 8, 9, 11, 12, 17};
    unsigned long long values[ASKED] = {0};
    void *out[ASKED];
    CUdeviceptr base, middle = region->address + region->bytes / 2;
    size_t bytes;
    uint32_t *copy = malloc(region->bytes);
    for (unsigned i = 0; i < ASKED; i++) {
        out[i] = &values[i];
    }
    CHECK(cuMemGetAddressRange_v2(&base, &bytes, middle));
    CHECK(cuPointerGetAttributes(ASKED, attributes, out, middle));
    CHECK(cuMemcpyDtoH_v2(copy, region->address, region->bytes));
    printf(" | %s 0x%llx range 0x%llx %zu context 0x%llx type %llu device 0x%llx buffer 0x%llx managed %llu "
           "ordinal %llu start 0x%llx %llu pool 0x%llx bytes %016llx",
           region->name, region->address, base, bytes, values[CONTEXT], values[MEMORY_TYPE], values[DEVICE_POINTER],
           values[BUFFER_ID], values[IS_MANAGED], values[ORDINAL], values[START], values[BYTES],
           values[POOL], (unsigned long long)job_hash(0, copy, (unsigned)(region->bytes / 4)));
    free(copy);
}

static void function_line(const struct job *job) {
    CUfunction function;
    int value;
    CHECK(cuModuleGetFunction(&function, job->module, "mix"));
    printf(" | function 0x%llx", (unsigned long long)function);
    for (int attribute = 0; attribute < 8; attribute++) {
        CHECK(cuFuncGetAttribute(&value, attribute, function));
        printf(" %d", value);
    }
}

static void stream_line(CUstream stream) {
    CUcontext context;
    unsigned flags;
    int priority;
    CHECK(cuStreamGetCtx(stream, &context));
    CHECK(cuStreamGetFlags(stream, &flags));
    CHECK(cuStreamGetPriority(stream, &priority));
    printf(" | stream 0x%llx context 0x%llx flags %u priority %d query %d", (unsigned long long)stream,
           (unsigned long long)context, flags, priority, cuStreamQuery(stream));
}

int main(int argc, char **argv) {
    struct job job = job_start(argc, argv);
    CUstream streams[2];
    CUevent events[3];
    CUcontext context;
    size_t free_bytes, total_bytes;
    unsigned flags, elapsed_bits;
    int active;
    float elapsed;
    CHECK(cuStreamCreate(&streams[0], STREAM_NON_BLOCKING));
    CHECK(cuStreamCreateWithPriority(&streams[1], 0, -1));
    allocate(&job, streams[0]);
    for (unsigned i = 0; i < 3; i++) {
        CHECK(cuEventCreate(&events[i], 0));
    }
    /* The third is never recorded. */
    CHECK(cuEventRecord(events[0], streams[0]));
    CHECK(cuEventRecord(events[1], streams[0]));
    CHECK(cuStreamSynchronize(streams[0]));
    for (unsigned step = 1; step <= job.steps; step++) {
        CHECK(cuCtxGetCurrent(&context));
        CHECK(cuDevicePrimaryCtxGetState(0, &flags, &active));
        CHECK(cuMemGetInfo_v2(&free_bytes, &total_bytes));
        CHECK(cuEventElapsedTime(&elapsed, events[0], events[1]));
        memcpy(&elapsed_bits, &elapsed, sizeof elapsed);
        printf("step %u: context 0x%llx flags %u active %d memory 0x%zx of %zu elapsed 0x%08x", step,
               (unsigned long long)context, flags, active, free_bytes, total_bytes, elapsed_bits);
        for (unsigned i = 0; i < REGIONS; i++) {
            region_line(&regions[i]);
        }
        function_line(&job);
        for (unsigned i = 0; i < 2; i++) {
            stream_line(streams[i]);
        }
        for (unsigned i = 0; i < 3; i++) {
            printf(" | event 0x%llx query %d", (unsigned long long)events[i], cuEventQuery(events[i]));
        }
        printf("\n");
        fflush(stdout);
        job_rest();
    }
    return 0;
}
