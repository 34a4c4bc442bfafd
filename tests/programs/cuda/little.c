/* Has much memory on the device and changes little of it in each step; now and then a piece goes, and another one comes
 * in its place.
 *
 *   little STEPS
 *
 * What it has after a step is the same in every run. After step N it stands still while the file `stop-N` is there. */
#include "job.h"

enum { PIECES = 10, WORDS = 2 << 20, CHANGED = 256 };

/* Words of which no page is like another one. */
static void fill(CUdeviceptr address, uint32_t seed) {
    uint32_t *words = malloc(WORDS * 4ul);
    for (uint32_t i = 0; i < WORDS; i++) {
        words[i] = (i + 1) * 2654435761u ^ seed;
    }
    CHECK(cuMemcpyHtoD_v2(address, words, WORDS * 4ul));
    free(words);
}

static CUdeviceptr made(uint32_t seed) {
    CUdeviceptr address;
    CHECK(cuMemAlloc_v2(&address, WORDS * 4ul));
    fill(address, seed);
    return address;
}

static uint64_t look(uint64_t sum, CUdeviceptr address, unsigned count) {
    uint32_t *words = malloc(count * 4ul);
    CHECK(cuMemcpyDtoH_v2(words, address, count * 4ul));
    sum = job_hash(sum, words, count);
    free(words);
    return sum;
}

int main(int argc, char **argv) {
    struct job job = job_start(argc, argv);
    CUdeviceptr memory[PIECES], small = job_alloc(CHANGED, 1);
    for (uint32_t i = 0; i < PIECES; i++) {
        memory[i] = made(i);
    }
    uint64_t sum = 0;
    for (unsigned step = 1; step <= job.steps; step++) {
        /* Not at its beginning, and elsewhere the next time. */
        CUdeviceptr changed = memory[step % PIECES] + step % 7 * (1 << 20);
        job_mix(&job, changed, CHANGED, step, NULL);
        job_mix(&job, small, CHANGED, step, NULL);
        sum = look(look(sum, changed, CHANGED), small, CHANGED);
        if (step % 4 == 3) {
            unsigned piece = step * 3 % PIECES;
            CHECK(cuMemFree_v2(memory[piece]));
            memory[piece] = made(step << 8);
        }
        job_line(step, sum);
        char stop[32];
        snprintf(stop, sizeof stop, "stop-%u", step);
        while (job_has_file(stop)) {
            usleep(1000);
        }
    }
    for (unsigned i = 0; i < PIECES; i++) {
        sum = look(sum, memory[i], WORDS);
    }
    printf("at last %016llx\n", (unsigned long long)sum);
    return 0;
}
