/* Initialises the driver and counts its devices at once, as launchers of training do, and has a context only in the last
 * third of its steps. */
#include "job.h"

CUresult cuDeviceGetCount(int *count);
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active);

enum { COUNT = 256 };

int main(int argc, char **argv) {
    unsigned steps = argc == 2 ? (unsigned)atoi(argv[1]) : 0, flags;
    uint32_t words[COUNT] = {0};
    uint64_t sum = 0;
    int devices, active;
    CHECK(cuInit(0));
    for (unsigned step = 1; step <= steps * 2 / 3; step++) {
        CHECK(cuDeviceGetCount(&devices));
        CHECK(cuDevicePrimaryCtxGetState(0, &flags, &active));
        sum = (sum ^ step) * 1099511628211ull + (unsigned)devices + (unsigned)active;
        job_line(step, sum);
    }
    struct job job = job_start(argc, argv);
    CUdeviceptr data = job_alloc(COUNT, 1);
    for (unsigned step = steps * 2 / 3 + 1; step <= steps; step++) {
        job_mix(&job, data, COUNT, step, NULL);
        CHECK(cuMemcpyDtoH_v2(words, data, sizeof words));
        job_line(step, job_hash(sum, words, COUNT));
    }
    return 0;
}
