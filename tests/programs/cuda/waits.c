/* Ranks that cannot be stopped at a common step, since one of them waits on the host for another one:
 *
 *   rank 0: a step with rank 2, then it waits for a byte from rank 1
 *   rank 1: some steps with rank 3, then it writes the byte
 *   rank 2: steps with rank 0
 *   rank 3: steps with rank 1, until rank 1 says which was the last one
 *
 * While the file `hold` exists, rank 1 goes on with the steps before the byte of HELD_STEP. Rank 2 makes the file `begun`
 * when it has begun the step after that one. If rank 1 is parked then, rank 0 never gets to that step. Rank 0 prints a line
 * for each of its steps.
 *
 *   waits STEPS */
#include <fcntl.h>

#include "nccl.h"

enum { COUNT = 64, RANKS = 4, STEPS_OF_RANK_1 = 10, STEP_US = 1500, HELD_STEP = 3 };

static unsigned steps;
static int byte[2];

static void wait_for_byte(void) {
    char got;
    if (read(byte[0], &got, 1) != 1) {
        fprintf(stderr, "rank 1 has gone\n");
        exit(1);
    }
}

static int is_held(unsigned step) { return step == HELD_STEP && access("hold", F_OK) == 0; }

/* Ranks 0 and 2. */
static void work(struct job *job, int rank, CUdeviceptr data, ncclComm_t pair, CUstream stream) {
    uint32_t words[COUNT];
    for (unsigned step = 1; step <= steps; step++) {
        job_mix(job, data, COUNT, step, stream);
        NCCL(ncclAllReduce((void *)data, (void *)data, COUNT, UINT32, SUM, pair, stream));
        if (rank == 2 && step == HELD_STEP + 1) {
            SYSTEM(open("begun", O_CREAT | O_WRONLY, 0644));
        }
        CHECK(cuStreamSynchronize(stream));
        if (rank == 0) {
            wait_for_byte();
            CHECK(cuMemcpyDtoH_v2(words, data, sizeof words));
            printf("step %u checksum %016llx\n", step, (unsigned long long)job_hash(0, words, COUNT));
            fflush(stdout);
        }
    }
}

/* Ranks 1 and 3: the sum of their words is 1 as long as rank 1 goes on. */
static void let_wait(int rank, CUdeviceptr word, ncclComm_t pair, CUstream stream) {
    for (unsigned step = 1; step <= steps; step++) {
        uint32_t goes_on = 1;
        for (unsigned mine = 1; goes_on; mine++) {
            goes_on = rank == 1 && (mine < STEPS_OF_RANK_1 || is_held(step));
            CHECK(cuMemcpyHtoD_v2(word, &goes_on, sizeof goes_on));
            NCCL(ncclAllReduce((void *)word, (void *)word, 1, UINT32, SUM, pair, stream));
            CHECK(cuStreamSynchronize(stream));
            CHECK(cuMemcpyDtoH_v2(&goes_on, word, sizeof goes_on));
            usleep(STEP_US);
        }
        if (rank == 1) {
            SYSTEM(write(byte[1], "x", 1));
        }
    }
}

static int be_rank(int rank, struct meeting *meeting) {
    struct job job = nccl_start(rank);
    int is_second_pair = rank % 2;
    ncclComm_t pair;
    CUstream stream;
    nccl_meet(meeting, rank);
    CHECK(cuStreamCreate(&stream, STREAM_NON_BLOCKING));
    NCCL(ncclCommInitRank(&pair, 2, meeting->ids[is_second_pair], rank / 2));
    CUdeviceptr data = job_alloc(COUNT, rank + 1);
    if (is_second_pair) {
        let_wait(rank, data, pair, stream);
    } else {
        work(&job, rank, data, pair, stream);
    }
    NCCL(ncclCommDestroy(pair));
    return 0;
}

int main(int argc, char **argv) {
    steps = argc == 2 ? (unsigned)atoi(argv[1]) : 0;
    if (steps == 0) {
        fprintf(stderr, "usage: %s STEPS\n", argv[0]);
        return 2;
    }
    SYSTEM(pipe(byte));
    return nccl_run(RANKS, be_rank);
}
