/* Ranks that connect all the time: each step has communicators of its own, and so calls that return only when others have
 * made them, too. In turns, each rank is late for them.
 *
 *   connects STEPS RANKS
 *
 * Rank 0 prints a line for each step. */
#include "nccl.h"

enum { COUNT = 240, LATE_US = 4000, PAIRS = 2 };

static unsigned steps;
static int ranks;

static void be_late(unsigned turn, int rank) {
    if ((int)(turn % (unsigned)ranks) == rank) {
        usleep(LATE_US);
    }
}

/* Every second rank is in one part, the others are in the other one. */
static void among_few(ncclComm_t all, int rank, unsigned step, CUdeviceptr data, CUstream stream) {
    ncclComm_t few;
    NCCL(ncclCommSplit(all, (rank + (int)step) % PAIRS, rank, &few, NULL));
    be_late(step, rank);
    NCCL(ncclAllReduce((void *)data, (void *)data, COUNT, UINT32, SUM, few, stream));
    CHECK(cuStreamSynchronize(stream));
    NCCL(ncclCommDestroy(few));
}

/* A part of the words goes on to the next rank, and then from one rank alone to the next. */
static void among_neighbours(ncclComm_t all, int rank, unsigned step, CUdeviceptr data, CUstream stream) {
    enum { PART = COUNT / 4 };
    ncclComm_t ring;
    NCCL(ncclCommSplit(all, 0, rank, &ring, NULL));
    int next = (rank + 1) % ranks, previous = (rank + ranks - 1) % ranks, one = (int)(step % (unsigned)ranks);
    be_late(step + 1, rank);
    NCCL(ncclGroupStart());
    NCCL(ncclSend((void *)data, PART, UINT32, next, ring, stream));
    NCCL(ncclRecv((void *)(data + 4 * PART), PART, UINT32, previous, ring, stream));
    NCCL(ncclGroupEnd());
    be_late(step + 2, rank);
    if (rank == one) {
        NCCL(ncclRecv((void *)(data + 8 * PART), PART, UINT32, next, ring, stream));
    } else if (rank == (one + 1) % ranks) {
        NCCL(ncclSend((void *)data, PART, UINT32, one, ring, stream));
    }
    CHECK(cuStreamSynchronize(stream));
    NCCL(ncclCommDestroy(ring));
}

static int be_rank(int rank, struct meeting *meeting) {
    struct job job = nccl_start(rank);
    ncclComm_t all;
    CUstream stream;
    nccl_meet(meeting, rank);
    CHECK(cuStreamCreate(&stream, STREAM_NON_BLOCKING));
    NCCL(ncclCommInitRank(&all, ranks, meeting->ids[0], rank));
    CUdeviceptr data = job_alloc(COUNT, rank + 1);
    uint32_t words[COUNT];
    for (unsigned step = 1; step <= steps; step++) {
        job_mix(&job, data, COUNT, step + rank, stream);
        among_few(all, rank, step, data, stream);
        among_neighbours(all, rank, step, data, stream);
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
    if (steps == 0 || ranks < 3 || ranks > MOST_RANKS) {
        fprintf(stderr, "usage: %s STEPS RANKS, at least 1 and 3\n", argv[0]);
        return 2;
    }
    return nccl_run(ranks, be_rank);
}
