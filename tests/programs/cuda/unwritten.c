/* Has much memory on the device, like an allocator that takes most of a device at its start, and writes little of it:
 * each step to another place in the first eighth, and now and then zeroes to all of what it has written.
 *
 *   unwritten STEPS MIB
 *
 * It ends early, after a whole step, when the file `end` is there. With the file `fill`, it writes to all of its memory
 * once, and says so by the file `filled`. */
#include "job.h"

enum { COUNT = 256, BYTES = COUNT * 4, CHUNK = 2 << 20 };

static uint64_t look(uint64_t sum, CUdeviceptr address) {
    uint32_t words[COUNT];
    CHECK(cuMemcpyDtoH_v2(words, address, BYTES));
    return job_hash(sum, words, COUNT);
}

static void zero(CUdeviceptr address, size_t bytes) {
    CHECK(cuMemsetD32_v2(address, 0, bytes / 4));
    CHECK(cuStreamSynchronize(NULL));
}

static void fill_if_told(CUdeviceptr memory, unsigned chunks) {
    if (!job_has_file("fill") || job_has_file("filled")) {
        return;
    }
    /* Behind the eighth that the steps use, so that the output does not depend on the moment. */
    for (unsigned chunk = chunks / 8; chunk < chunks; chunk++) {
        CHECK(cuMemsetD32_v2(memory + (CUdeviceptr)chunk * CHUNK, chunk + 1, COUNT));
    }
    CHECK(cuStreamSynchronize(NULL));
    FILE *said = fopen("filled", "w");
    if (said == NULL || fclose(said) != 0) {
        perror("filled");
        exit(1);
    }
}

int main(int argc, char **argv) {
    struct job job = job_start(argc >= 3 ? 2 : argc, argv);
    unsigned chunks = argc >= 3 ? (unsigned)atoi(argv[2]) / 2 : 0, used = chunks / 8;
    if (used == 0) {
        return 2;
    }
    CUdeviceptr memory, small = job_alloc(COUNT, 1);
    CHECK(cuMemAlloc_v2(&memory, (size_t)chunks * CHUNK));
    uint64_t sum = 0;
    for (unsigned step = 1; step <= job.steps; step++) {
        CUdeviceptr place = memory + (CUdeviceptr)(step * 5 % used) * CHUNK + step % 31 * (64 << 10);
        job_mix(&job, place, COUNT, step, NULL);
        job_mix(&job, small, COUNT, step, NULL);
        sum = look(look(sum, place), small);
        if (step % 64 == 0) {
            zero(memory, (size_t)used * CHUNK);
        }
        fill_if_told(memory, chunks);
        if (job_has_file("end")) {
            job.steps = step;
        }
        job_line(step, sum);
    }
    for (unsigned chunk = 0; chunk < used; chunk++) {
        for (unsigned at = 0; at < CHUNK; at += 64 << 10) {
            sum = look(sum, memory + (CUdeviceptr)chunk * CHUNK + at);
        }
    }
    for (unsigned chunk = used; chunk < chunks; chunk++) {
        uint32_t word, expected = job_has_file("filled") ? chunk + 1 : 0;
        CHECK(cuMemcpyDtoH_v2(&word, memory + (CUdeviceptr)chunk * CHUNK, 4));
        if (word != expected) {
            printf("chunk %u has %u, not %u\n", chunk, word, expected);
            return 1;
        }
    }
    printf("at last %016llx\n", (unsigned long long)sum);
    return 0;
}
