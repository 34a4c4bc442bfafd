/* Memory of the program's own that it has exported, and imported again by the descriptor. Every few steps it is another
 * one. While there is none, it stands still as long as the file `pause` is there. */
#include "vmm.h"

enum { COUNT = 128, BYTES = COUNT * 4, DESCRIPTOR = 1, STEPS_EACH = 5 };

CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle, int type,
                                      unsigned long long flags);
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shareable, int type);

struct memory {
    CUmemGenericAllocationHandle handle;
    CUdeviceptr address;
};

static size_t granule_bytes;

static struct memory map(CUmemGenericAllocationHandle handle) {
    struct memory memory = {.handle = handle};
    CHECK(cuMemAddressReserve(&memory.address, granule_bytes, 0, 0, 0));
    vmm_map(memory.address, granule_bytes, handle);
    return memory;
}

static struct memory create(int handle_types) {
    struct allocation_prop prop = vmm_prop;
    CUmemGenericAllocationHandle handle;
    prop.handle_types = handle_types;
    CHECK(cuMemCreate(&handle, granule_bytes, &prop, 0));
    return map(handle);
}

static void drop(struct memory memory) {
    CHECK(cuMemUnmap(memory.address, granule_bytes));
    CHECK(cuMemRelease(memory.handle));
    CHECK(cuMemAddressFree(memory.address, granule_bytes));
}

/* The same memory, by a descriptor that is closed then. */
static struct memory take_up(CUmemGenericAllocationHandle handle) {
    CUmemGenericAllocationHandle imported;
    int descriptor;
    CHECK(cuMemExportToShareableHandle(&descriptor, handle, DESCRIPTOR, 0));
    CHECK(cuMemImportFromShareableHandle(&imported, (void *)(uintptr_t)descriptor, DESCRIPTOR));
    SYSTEM(close(descriptor));
    return map(imported);
}

int main(int argc, char **argv) {
    struct job job = job_start(argc, argv);
    uint64_t sum = 0;
    uint32_t words[COUNT];
    granule_bytes = vmm_granularity_bytes();
    struct memory written = create(DESCRIPTOR), read = take_up(written.handle);
    CHECK(cuMemsetD32_v2(written.address, 1, COUNT));
    for (unsigned step = 1; step <= job.steps; step++) {
        if (step % STEPS_EACH == 0) {
            CHECK(cuMemcpyDtoH_v2(words, read.address, BYTES));
            drop(written);
            drop(read);
            job_pause_if_told();
            written = create(DESCRIPTOR);
            read = take_up(written.handle);
            CHECK(cuMemcpyHtoD_v2(written.address, words, BYTES));
        }
        job_mix(&job, written.address, COUNT, step, NULL);
        CHECK(cuMemcpyDtoH_v2(words, read.address, BYTES));
        sum = job_hash(sum, words, COUNT);
        job_line(step, sum);
    }
    return 0;
}
