/* A rank that joins others (ncclCommGrow). At first the last rank works alone. In step JOIN_STEP it joins the communicator of
 * the others, which is destroyed then. Rank 0 makes the unique ID.
 *
 *   joins STEPS RANKS
 *
 * Rank 0 prints a line for each step. */
#include "nccl.h"

int ncclCommGetUniqueId(ncclComm_t comm, ncclUniqueId *id);
int ncclCommGrow(ncclComm_t comm, int ranks, const ncclUniqueId *id, int rank, ncclComm_t *out, void *config);

enum { COUNT = 240, JOIN_STEP = 4 };

static unsigned steps;
static int ranks;

/* The communicator of all ranks, of which the last one is new. */
static ncclComm_t grown(ncclComm_t before, int rank, struct meeting *meeting) {
    ncclComm_t all;
    int is_new = before == NULL;
    if (rank == 0) {
        NCCL(ncclCommGetUniqueId(before, &meeting->ids[1]));
        meeting->are_there = 2;
    }
    while (is_new && meeting->are_there < 2) {
        usleep(1000);
    }
    const ncclUniqueId *id = rank == 0 || is_new ? &meeting->ids[1] : NULL;
    NCCL(ncclCommGrow(before, ranks, id, is_new ? rank : -1, &all, NULL));
    if (before != NULL) {
        NCCL(ncclCommDestroy(before));
    }
    return all;
}

static int be_rank(int rank, struct meeting *meeting) {
    struct job job = nccl_start(rank);
    ncclComm_t all = NULL;
    CUstream stream;
    nccl_meet(meeting, rank);
    CHECK(cuStreamCreate(&stream, STREAM_NON_BLOCKING));
    if (rank < ranks - 1) {
        NCCL(ncclCommInitRank(&all, ranks - 1, meeting->ids[0], rank));
    }
    CUdeviceptr data = job_alloc(COUNT, rank + 1);
    uint32_t words[COUNT];
    for (unsigned step = 1; step <= steps; step++) {
        if (step == JOIN_STEP) {
            all = grown(all, rank, meeting);
        }
        job_mix(&job, data, COUNT, step + rank, stream);
        if (all != NULL) {
            NCCL(ncclAllReduce((void *)data, (void *)data, COUNT, UINT32, SUM, all, stream));
        }
        CHECK(cuStreamSynchronize(stream));
        CHECK(cuMemcpyDtoH_v2(words, data, sizeof words));
        if (rank == 0) {
            job_line(step, job_hash(0, words, COUNT));
        } else {
            job_rest();
        }
    }
    NCCL(ncclCommDestroy(all));
    return 0;
}

int main(int argc, char **argv) {
    steps = argc == 3 ? (unsigned)atoi(argv[1]) : 0;
    ranks = argc == 3 ? atoi(argv[2]) : 0;
    if (steps < JOIN_STEP || ranks < 3 || ranks > MOST_RANKS) {
        fprintf(stderr, "usage: %s STEPS RANKS, at least %d and 3\n", argv[0], JOIN_STEP);
        return 2;
    }
    return nccl_run(ranks, be_rank);
}
