/* One process with several ranks of NCCL, as nn.DataParallel has them: a device, a context and a stream for each, made current
 * in turns by one thread. The communicators of ncclCommInitAll work in groups over all ranks; others are made and destroyed
 * again in a group now and then.
 *
 *   one_process STEPS RANKS
 */
#include "nccl.h"

int ncclCommInitAll(ncclComm_t *comms, int count, const int *devices);

enum { COUNT = 240, MADE_EACH = 5 };

static int ranks;

struct rank {
    struct job job;
    CUstream stream;
    ncclComm_t world;
    CUdeviceptr mine, received;
};

static void set_up(struct rank *all) {
    int devices[MOST_RANKS];
    ncclComm_t worlds[MOST_RANKS];
    for (int i = 0; i < ranks; i++) {
        all[i].job = nccl_start(i);
        CHECK(cuStreamCreate(&all[i].stream, STREAM_NON_BLOCKING));
        all[i].mine = job_alloc(COUNT, i + 1);
        all[i].received = job_alloc(COUNT, 0);
        devices[i] = i;
    }
    NCCL(ncclCommInitAll(worlds, ranks, devices));
    for (int i = 0; i < ranks; i++) {
        all[i].world = worlds[i];
    }
}

static void synchronize(struct rank *all) {
    for (int i = 0; i < ranks; i++) {
        CHECK(cuCtxSetCurrent(all[i].job.context));
        CHECK(cuStreamSynchronize(all[i].stream));
    }
}

/* Communicators for this step only: of all ranks, in the reverse order. */
static void work_in_others(struct rank *all, unsigned step) {
    ncclUniqueId id;
    ncclComm_t others[MOST_RANKS];
    NCCL(ncclGetUniqueId(&id));
    NCCL(ncclGroupStart());
    for (int i = 0; i < ranks; i++) {
        CHECK(cuCtxSetCurrent(all[i].job.context));
        NCCL(ncclCommInitRank(&others[i], ranks, id, ranks - 1 - i));
    }
    NCCL(ncclGroupEnd());
    NCCL(ncclGroupStart());
    for (int i = 0; i < ranks; i++) {
        void *mine = (void *)all[i].mine;
        NCCL(ncclBroadcast(mine, mine, COUNT / 4, UINT32, (int)step % ranks, others[i], all[i].stream));
    }
    NCCL(ncclGroupEnd());
    synchronize(all);
    for (int i = 0; i < ranks; i++) {
        CHECK(cuCtxSetCurrent(all[i].job.context));
        NCCL(ncclCommDestroy(others[i]));
    }
}

static void step_of(struct rank *all, unsigned step) {
    for (int i = 0; i < ranks; i++) {
        CHECK(cuCtxSetCurrent(all[i].job.context));
        job_mix(&all[i].job, all[i].mine, COUNT, step + i, all[i].stream);
    }
    NCCL(ncclGroupStart());
    for (int i = 0; i < ranks; i++) {
        int next = (i + 1) % ranks, last = (i + ranks - 1) % ranks;
        NCCL(ncclSend((void *)all[i].mine, COUNT, UINT32, next, all[i].world, all[i].stream));
        NCCL(ncclRecv((void *)all[i].received, COUNT, UINT32, last, all[i].world, all[i].stream));
    }
    NCCL(ncclGroupEnd());
    NCCL(ncclGroupStart());
    for (int i = 0; i < ranks; i++) {
        void *from = (void *)all[i].received, *to = (void *)all[i].mine;
        NCCL(ncclAllReduce(from, to, COUNT, UINT32, SUM, all[i].world, all[i].stream));
    }
    NCCL(ncclGroupEnd());
    if (step % MADE_EACH == 0) {
        work_in_others(all, step);
    }
    for (int i = 0; i < ranks; i++) {
        CHECK(cuCtxSetCurrent(all[i].job.context));
        job_mix(&all[i].job, all[i].mine, COUNT, i * 3, all[i].stream);
    }
    synchronize(all);
}

static uint64_t hash_of(struct rank *all) {
    uint32_t words[COUNT];
    uint64_t sum = 0;
    for (int i = 0; i < ranks; i++) {
        CHECK(cuCtxSetCurrent(all[i].job.context));
        CHECK(cuMemcpyDtoH_v2(words, all[i].mine, sizeof words));
        sum = job_hash(sum, words, COUNT);
    }
    return sum;
}

int main(int argc, char **argv) {
    static struct rank all[MOST_RANKS];
    unsigned steps = argc == 3 ? (unsigned)atoi(argv[1]) : 0;
    ranks = argc == 3 ? atoi(argv[2]) : 0;
    if (steps == 0 || ranks < 2 || ranks > MOST_RANKS) {
        fprintf(stderr, "usage: %s STEPS RANKS\n", argv[0]);
        return 2;
    }
    set_up(all);
    for (unsigned step = 1; step <= steps; step++) {
        step_of(all, step);
        job_line(step, hash_of(all));
    }
    for (int i = 0; i < ranks; i++) {
        NCCL(ncclCommDestroy(all[i].world));
    }
    return 0;
}
