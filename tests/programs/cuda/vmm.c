/* Does its own virtual memory: physical memory is created, mapped, moved to another address and released all the
 * time, and some of it is mapped nowhere for a while. */
#include "vmm.h"

enum { SLOTS = 6, COUNT = 128, BYTES = COUNT * 4 };

int main(int argc, char **argv) {
    struct job job = job_start(argc, argv);
    size_t granule = vmm_granularity_bytes();
    CUdeviceptr base;
    CUmemGenericAllocationHandle handles[SLOTS];
    uint64_t sum = 0;
    uint32_t words[COUNT];
    CHECK(cuMemAddressReserve(&base, SLOTS * granule, 0, 0, 0));
    /* Memory i is mapped in slot i, but for the first one, which is mapped nowhere: a slot is always free. */
    for (unsigned i = 0; i < SLOTS; i++) {
        CHECK(cuMemCreate(&handles[i], granule, &vmm_prop, 0));
        vmm_map(base + i * granule, granule, handles[i]);
        CHECK(cuMemsetD32_v2(base + i * granule, i, COUNT));
    }
    CHECK(cuMemUnmap(base, granule));
    for (unsigned step = 1; step <= job.steps; step++) {
        /* What was mapped nowhere goes into the free slot, and the next one is unmapped. */
        CUdeviceptr slot = base + (step - 1) % SLOTS * granule, next = base + step % SLOTS * granule;
        CUmemGenericAllocationHandle parked = handles[(step - 1) % SLOTS];
        vmm_map(slot, granule, parked);
        job_mix(&job, slot, COUNT, step, NULL);
        CHECK(cuMemcpyDtoH_v2(words, slot, BYTES));
        sum = job_hash(sum, words, COUNT);
        CHECK(cuMemUnmap(next, granule));
        if (step % 5 == 0) {
            /* Another address range, for the memory that is nowhere now; and then new memory in its place. */
            CUdeviceptr elsewhere;
            CHECK(cuMemAddressReserve(&elsewhere, granule, 0, 0, 0));
            vmm_map(elsewhere, granule, handles[step % SLOTS]);
            CHECK(cuMemcpyDtoH_v2(words, elsewhere, BYTES));
            sum = job_hash(sum, words, COUNT);
            /* Memory lives on as long as it is mapped. */
            CHECK(cuMemRelease(handles[step % SLOTS]));
            job_mix(&job, elsewhere, COUNT, step, NULL);
            CHECK(cuMemcpyDtoH_v2(words, elsewhere, BYTES));
            CHECK(cuMemUnmap(elsewhere, granule));
            CHECK(cuMemAddressFree(elsewhere, granule));
            CHECK(cuMemCreate(&handles[step % SLOTS], granule, &vmm_prop, 0));
            vmm_map(next, granule, handles[step % SLOTS]);
            CHECK(cuMemcpyHtoD_v2(next, words, BYTES));
            CHECK(cuMemUnmap(next, granule));
        }
        job_line(step, sum);
    }
    return 0;
}
