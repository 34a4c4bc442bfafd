/* The calls for virtual memory, and one way to use them. */
#ifndef VMM_H
#define VMM_H

#include "job.h"

typedef unsigned long long CUmemGenericAllocationHandle;
struct location {
    int type, id;
};
struct allocation_prop {
    int type, handle_types;
    struct location location;
    void *win32;
    unsigned char flags[8];
};
struct access {
    struct location location;
    int flags;
};
CUresult cuMemGetAllocationGranularity(size_t *bytes, const struct allocation_prop *prop, int option);
CUresult cuMemAddressReserve(CUdeviceptr *address, size_t bytes, size_t alignment, CUdeviceptr hint,
                             unsigned long long flags);
CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes);
CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const struct allocation_prop *prop,
                     unsigned long long flags);
CUresult cuMemRelease(CUmemGenericAllocationHandle handle);
CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags);
CUresult cuMemUnmap(CUdeviceptr address, size_t bytes);
CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const struct access *access, size_t count);

/* Memory of the first device, pinned, as there is no other. */
static const struct allocation_prop vmm_prop = {.type = 1, .location = {.type = 1}};

static inline size_t vmm_granularity_bytes(void) {
    size_t bytes;
    CHECK(cuMemGetAllocationGranularity(&bytes, &vmm_prop, 0));
    return bytes;
}

/* Maps it, for reading and writing. */
static inline void vmm_map(CUdeviceptr address, size_t bytes, CUmemGenericAllocationHandle handle) {
    struct access access = {.location = {.type = 1}, .flags = 3};
    CHECK(cuMemMap(address, bytes, 0, handle, 0));
    CHECK(cuMemSetAccess(address, bytes, &access, 1));
}

#endif
