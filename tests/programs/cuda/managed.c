/* Managed memory, which the host reads without a copy. Once the file `private` is there it is ordinary memory. */
#include "job.h"

CUresult cuMemAllocManaged(CUdeviceptr *address, size_t bytes, unsigned flags);

enum { COUNT = 128, BYTES = COUNT * 4, GLOBAL = 1 };

int main(int argc, char **argv) {
    struct job job = job_start(argc, argv);
    CUdeviceptr data;
    uint64_t sum = 0;
    uint32_t words[COUNT] = {0};
    int is_managed = 1;
    CHECK(cuMemAllocManaged(&data, BYTES, GLOBAL));
    memset((void *)data, 1, BYTES);
    for (unsigned step = 1; step <= job.steps; step++) {
        if (is_managed && job_has_file("private")) {
            memcpy(words, (void *)data, BYTES);
            CHECK(cuMemFree_v2(data));
            data = job_alloc(COUNT, 0);
            CHECK(cuMemcpyHtoD_v2(data, words, BYTES));
            is_managed = 0;
        }
        job_mix(&job, data, COUNT, step, NULL);
        CHECK(cuCtxSynchronize());
        if (is_managed) {
            memcpy(words, (void *)data, BYTES);
        } else {
            CHECK(cuMemcpyDtoH_v2(words, data, BYTES));
        }
        sum = job_hash(sum, words, COUNT);
        job_line(step, sum);
    }
    return 0;
}
