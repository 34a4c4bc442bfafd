/* Ranks of which one lets the others wait: in step LAG_STEP, the last rank does not call ncclAllReduce as long as the file
 * `hold` exists. Meanwhile it sleeps; while the file `busy` exists too, it launches kernels. All ranks wait before that as
 * long as the file `early` exists, and after that as long as `end` exists. Rank 0 prints a line for each step.
 *
 *   lags STEPS RANKS */
#include "nccl.h"

enum { COUNT = 64, EARLY_STEP = 2, LAG_STEP = 5, END_STEP = 8, NAP_US = 20000 };

static unsigned steps;
static int ranks;

static void lag(struct job *job, CUdeviceptr own, CUstream stream) {
    for (unsigned nap = 0; access("hold", F_OK) == 0; nap++) {
        if (access("busy", F_OK) == 0) {
            job_mix(job, own, COUNT, nap, stream);
            CHECK(cuStreamSynchronize(stream));
        }
        usleep(NAP_US);
    }
}

static int be_rank(int rank, struct meeting *meeting) {
    struct job job = nccl_start(rank);
    ncclComm_t all;
    CUstream stream;
    nccl_meet(meeting, rank);
    CHECK(cuStreamCreate(&stream, STREAM_NON_BLOCKING));
    NCCL(ncclCommInitRank(&all, ranks, meeting->ids[0], rank));
    CUdeviceptr data = job_alloc(COUNT, rank + 1), own = job_alloc(COUNT, 99);
    uint32_t words[COUNT];
    for (unsigned step = 1; step <= steps; step++) {
        job_mix(&job, data, COUNT, step, stream);
        if (rank == ranks - 1 && step == LAG_STEP) lag(&job, own, stream);
        NCCL(ncclAllReduce((void *)data, (void *)data, COUNT, UINT32, SUM, all, stream));
        CHECK(cuStreamSynchronize(stream));
        if (rank == 0) {
            CHECK(cuMemcpyDtoH_v2(words, data, sizeof words));
            job_line(step, job_hash(0, words, COUNT));
        }
        while (step == EARLY_STEP && access("early", F_OK) == 0) usleep(NAP_US);
        while (step == END_STEP && access("end", F_OK) == 0) usleep(NAP_US);
    }
    NCCL(ncclCommDestroy(all));
    return 0;
}

int main(int argc, char **argv) {
    steps = argc == 3 ? (unsigned)atoi(argv[1]) : 0;
    ranks = argc == 3 ? atoi(argv[2]) : 0;
    if (steps == 0 || ranks < 2) {
        fprintf(stderr, "usage: %s STEPS RANKS\n", argv[0]);
        return 2;
    }
    return nccl_run(ranks, be_rank);
}
