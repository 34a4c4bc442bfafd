/* Has a device open with which memory of the GPU can be registered, or has its memory mapped and no descriptor of it. Once
 * the file `private` is there, it has neither. With `late`, another thread opens it when the file `late` is there, and says
 * so by the file `opened`.
 *
 *   registered STEPS DEVICE open|mapped|late */
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>

#include "job.h"

enum { COUNT = 128, BYTES = COUNT * 4 };

static void *open_late(void *path) {
    while (!job_has_file("late")) {
        usleep(1000);
    }
    SYSTEM(open(path, O_RDWR | O_CLOEXEC));
    SYSTEM(open("opened", O_RDWR | O_CREAT | O_CLOEXEC, 0644));
    return NULL;
}

int main(int argc, char **argv) {
    if (argc != 4) {
        return 2;
    }
    struct job job = job_start(2, argv);
    CUdeviceptr data = job_alloc(COUNT, 0);
    uint64_t sum = 0;
    uint32_t words[COUNT];
    int device = -1;
    pthread_t late;
    if (strcmp(argv[3], "late") == 0) {
        if (pthread_create(&late, NULL, open_late, argv[2]) != 0) {
            fprintf(stderr, "no thread\n");
            return 1;
        }
    } else {
        device = open(argv[2], O_RDWR | O_CLOEXEC);
        SYSTEM(device);
    }
    void *memory = MAP_FAILED;
    if (strcmp(argv[3], "mapped") == 0) {
        memory = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, device, 0);
        if (memory == MAP_FAILED) {
            perror("mmap");
            return 1;
        }
        SYSTEM(close(device));
        device = -1;
    }
    for (unsigned step = 1; step <= job.steps; step++) {
        if (job_has_file("private")) {
            if (device >= 0) {
                SYSTEM(close(device));
                device = -1;
            }
            if (memory != MAP_FAILED) {
                SYSTEM(munmap(memory, BYTES));
                memory = MAP_FAILED;
            }
        }
        job_mix(&job, data, COUNT, step, NULL);
        CHECK(cuMemcpyDtoH_v2(words, data, BYTES));
        sum = job_hash(sum, words, COUNT);
        job_line(step, sum);
    }
    return 0;
}
