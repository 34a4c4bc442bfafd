/* Has a device open with which memory of the GPU can be registered, GDRCopy's: `gdrdrv` in the directory of the variable
 * CKPT_TEST_DEVICES. Once the file `private` is there, it has closed it. */
#include <fcntl.h>

#include "job.h"

enum { COUNT = 128, BYTES = COUNT * 4 };

int main(int argc, char **argv) {
    struct job job = job_start(argc, argv);
    CUdeviceptr data = job_alloc(COUNT, 0);
    uint64_t sum = 0;
    uint32_t words[COUNT];
    char path[4096];
    const char *devices = getenv("CKPT_TEST_DEVICES");
    snprintf(path, sizeof path, "%sgdrdrv", devices ? devices : "/dev/");
    int device = open(path, O_RDWR | O_CLOEXEC);
    SYSTEM(device);
    for (unsigned step = 1; step <= job.steps; step++) {
        if (device >= 0 && job_has_file("private")) {
            SYSTEM(close(device));
            device = -1;
        }
        job_mix(&job, data, COUNT, step, NULL);
        CHECK(cuMemcpyDtoH_v2(words, data, BYTES));
        sum = job_hash(sum, words, COUNT);
        job_line(step, sum);
    }
    return 0;
}
