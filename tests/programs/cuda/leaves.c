/* Ranks that go on without those that no longer answer. In step SHRINK_STEP the last rank does not call the collective of the
 * others, who then make a communicator without it (ncclCommShrink with NCCL_SHRINK_ABORT). In step REVOKE_STEP it is the next
 * one, and they stop the work themselves first (ncclCommRevoke). A rank that is left out keeps its communicator and works
 * alone.
 *
 *   leaves STEPS RANKS
 *
 * Rank 0 prints a line for each step. */
#include "nccl.h"

int ncclCommShrink(ncclComm_t comm, int *excluded, int count, ncclComm_t *out, void *config, int flags);
int ncclCommRevoke(ncclComm_t comm, int flags);
int ncclCommAbort(ncclComm_t comm);

enum { COUNT = 240, SHRINK_STEP = 4, REVOKE_STEP = 8, WAIT_US = 20000, ABORT_FIRST = 1 };

static unsigned steps;
static int ranks;

/* The other rank does not take part in `lost`, whose content is undefined afterwards. */
static ncclComm_t without(ncclComm_t all, int excluded, int is_revoked, CUdeviceptr lost, CUstream stream) {
    ncclComm_t left;
    NCCL(ncclAllReduce((void *)lost, (void *)lost, COUNT, UINT32, SUM, all, stream));
    usleep(WAIT_US);
    if (is_revoked) {
        NCCL(ncclCommRevoke(all, 0));
    }
    NCCL(ncclCommShrink(all, &excluded, 1, &left, NULL, is_revoked ? 0 : ABORT_FIRST));
    return left;
}

static int be_rank(int rank, struct meeting *meeting) {
    struct job job = nccl_start(rank);
    ncclComm_t all[3];
    int made = 1;
    CUstream stream;
    nccl_meet(meeting, rank);
    CHECK(cuStreamCreate(&stream, STREAM_NON_BLOCKING));
    NCCL(ncclCommInitRank(&all[0], ranks, meeting->ids[0], rank));
    CUdeviceptr data = job_alloc(COUNT, rank + 1), lost = job_alloc(COUNT, 0);
    uint32_t words[COUNT];
    int is_alone = 0;
    for (unsigned step = 1; step <= steps; step++) {
        if (step == SHRINK_STEP || step == REVOKE_STEP) {
            int excluded = ranks - (step == SHRINK_STEP ? 1 : 2);
            is_alone |= rank == excluded;
            if (!is_alone) {
                all[made] = without(all[made - 1], excluded, step == REVOKE_STEP, lost, stream);
                made++;
            }
        }
        job_mix(&job, data, COUNT, step + rank, stream);
        if (!is_alone) {
            NCCL(ncclAllReduce((void *)data, (void *)data, COUNT, UINT32, SUM, all[made - 1], stream));
        }
        CHECK(cuStreamSynchronize(stream));
        CHECK(cuMemcpyDtoH_v2(words, data, sizeof words));
        if (rank == 0) {
            job_line(step, job_hash(0, words, COUNT));
        } else {
            job_rest();
        }
    }
    /* Others use this rank's memory until they have done their steps. */
    __sync_add_and_fetch(&meeting->are_there, 1);
    while (meeting->are_there <= ranks) {
        usleep(1000);
    }
    while (made > 0) {
        NCCL(ncclCommAbort(all[--made]));
    }
    return 0;
}

int main(int argc, char **argv) {
    steps = argc == 3 ? (unsigned)atoi(argv[1]) : 0;
    ranks = argc == 3 ? atoi(argv[2]) : 0;
    if (steps == 0 || ranks < 4 || ranks > MOST_RANKS) {
        fprintf(stderr, "usage: %s STEPS RANKS, at least 4\n", argv[0]);
        return 2;
    }
    return nccl_run(ranks, be_rank);
}
