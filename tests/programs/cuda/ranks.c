/* Ranks that train together with NCCL, and use all that a consistent cut has to count: several communicators on several
 * streams at the same time, groups, sends and receives, captured collectives, communicators that are split off and
 * destroyed again and again. A rank is late now and then; the last one may be told to pause. A thread of each rank polls its
 * communicators and events all the time, as the watchdog of PyTorch does.
 *
 *   ranks STEPS RANKS [FIRST COUNT FILE]
 *
 * With further arguments, ranks FIRST to FIRST + COUNT - 1 are on this machine, and the machines learn the unique IDs by a
 * file. The first process starts the ranks, and ends with 1 as soon as one has failed. Rank 0 prints a line for each step, with
 * a checksum over the memory of all ranks. As soon as there is a file `enough`, they end after one of the next steps. */
#include <pthread.h>
#include <stdatomic.h>

#include "nccl.h"

typedef struct CUgraph_st *CUgraph;
typedef struct CUgraphExec_st *CUgraphExec;
CUresult cuStreamBeginCapture_v2(CUstream stream, int mode);
CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph);
CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags);
CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream);
CUresult cuEventQuery(CUevent event);
int ncclCommGetAsyncError(ncclComm_t comm, int *error);

enum { COUNT = 240, SPLITS_EACH = 6, LATE_EACH = 5 };
enum { NOT_READY = 600, POLL_US = 1000 };

static unsigned steps;
static int ranks;

struct rank {
    struct job job;
    int rank;
    CUstream first, second;
    CUevent first_done, second_done;
    /* All ranks; all ranks again, for the graph; those with the same parity. */
    ncclComm_t world, captured, half;
    CUgraphExec graph;
    CUdeviceptr mine, received, scattered, graphs, all, enough;
    pthread_t watchdog;
    atomic_int is_watched;
};

/* Fails the job if a communicator or the device has an error. */
static void *watch(void *argument) {
    struct rank *rank = argument;
    CHECK(cuCtxSetCurrent(rank->job.context));
    while (rank->is_watched) {
        ncclComm_t communicators[] = {rank->world, rank->captured, rank->half};
        CUevent events[] = {rank->first_done, rank->second_done};
        for (int i = 0; i < 3; i++) {
            int error;
            NCCL(ncclCommGetAsyncError(communicators[i], &error));
            NCCL(error);
        }
        for (int i = 0; i < 2; i++) {
            CUresult result = cuEventQuery(events[i]);
            if (result != NOT_READY) {
                CHECK(result);
            }
        }
        usleep(POLL_US);
    }
    return NULL;
}

static CUgraphExec capture(struct rank *rank) {
    CUgraph graph;
    CUgraphExec exec;
    CHECK(cuStreamBeginCapture_v2(rank->first, 1));
    job_mix(&rank->job, rank->graphs, COUNT, rank->rank, rank->first);
    NCCL(ncclAllReduce((void *)rank->graphs, (void *)rank->graphs, COUNT, UINT32, MAX, rank->captured, rank->first));
    NCCL(ncclGroupStart());
    NCCL(ncclAllReduce((void *)rank->graphs, (void *)rank->graphs, COUNT / 2, UINT32, SUM, rank->captured, rank->first));
    NCCL(ncclGroupEnd());
    CHECK(cuStreamEndCapture(rank->first, &graph));
    CHECK(cuGraphInstantiateWithFlags(&exec, graph, 0));
    return exec;
}

static void set_up(struct rank *rank, struct meeting *meeting) {
    rank->job = nccl_start(rank->rank);
    CHECK(cuStreamCreate(&rank->first, STREAM_NON_BLOCKING));
    CHECK(cuStreamCreate(&rank->second, STREAM_NON_BLOCKING));
    CHECK(cuEventCreate(&rank->first_done, 0));
    CHECK(cuEventCreate(&rank->second_done, 0));
    nccl_meet(meeting, rank->rank);
    NCCL(ncclCommInitRank(&rank->world, ranks, meeting->ids[0], rank->rank));
    NCCL(ncclCommInitRank(&rank->captured, ranks, meeting->ids[1], rank->rank));
    NCCL(ncclCommSplit(rank->world, rank->rank % 2, rank->rank, &rank->half, NULL));
    rank->mine = job_alloc(COUNT, rank->rank + 1);
    rank->received = job_alloc(COUNT, 0);
    rank->scattered = job_alloc(COUNT, 0);
    rank->graphs = job_alloc(COUNT, rank->rank + 7);
    rank->all = job_alloc(COUNT * MOST_RANKS, 0);
    rank->enough = job_alloc(1, 0);
    rank->graph = capture(rank);
    rank->is_watched = 1;
    if (pthread_create(&rank->watchdog, NULL, watch, rank) != 0) {
        fprintf(stderr, "no thread\n");
        exit(1);
    }
}

/* A communicator for this step only, of ranks in the reverse order. */
static void split_off(struct rank *rank, unsigned step) {
    ncclComm_t part;
    NCCL(ncclCommSplit(rank->world, (rank->rank + step) % 3 == 0, -rank->rank, &part, NULL));
    NCCL(ncclBroadcast((void *)rank->mine, (void *)rank->mine, COUNT / 4, UINT32, 0, part, rank->first));
    CHECK(cuStreamSynchronize(rank->first));
    NCCL(ncclCommDestroy(part));
}

/* What belongs to the second stream runs beside the first one's. */
static void step_of(struct rank *rank, unsigned step) {
    int next = (rank->rank + 1) % ranks, last = (rank->rank + ranks - 1) % ranks;
    size_t part = COUNT / ((ranks + (rank->rank % 2 == 0)) / 2);
    job_mix(&rank->job, rank->mine, COUNT, step + rank->rank, rank->first);
    CHECK(cuEventRecord(rank->first_done, rank->first));
    CHECK(cuStreamWaitEvent(rank->second, rank->first_done, 0));
    NCCL(ncclReduceScatter((void *)rank->mine, (void *)rank->scattered, part, UINT32, SUM, rank->half, rank->second));
    NCCL(ncclGroupStart());
    NCCL(ncclSend((void *)rank->mine, COUNT, UINT32, next, rank->world, rank->first));
    NCCL(ncclRecv((void *)rank->received, COUNT, UINT32, last, rank->world, rank->first));
    NCCL(ncclGroupEnd());
    job_mix(&rank->job, rank->received, COUNT, step, rank->first);
    CHECK(cuGraphLaunch(rank->graph, rank->first));
    CHECK(cuEventRecord(rank->second_done, rank->second));
    CHECK(cuStreamWaitEvent(rank->first, rank->second_done, 0));
    NCCL(ncclAllReduce((void *)rank->received, (void *)rank->mine, COUNT, UINT32, SUM, rank->world, rank->first));
    if (step % SPLITS_EACH == 0) {
        split_off(rank, step);
    }
    job_mix(&rank->job, rank->mine, COUNT, rank->rank * 3, rank->first);
}

static uint64_t hash_of(struct rank *rank, CUdeviceptr data) {
    static uint32_t words[COUNT * MOST_RANKS];
    NCCL(ncclAllGather((void *)data, (void *)rank->all, COUNT, UINT32, rank->world, rank->first));
    CHECK(cuStreamSynchronize(rank->first));
    CHECK(cuMemcpyDtoH_v2(words, rank->all, COUNT * 4ul * ranks));
    return job_hash(rank->rank, words, COUNT * ranks);
}

static int be_rank(int number, struct meeting *meeting) {
    struct rank rank = {.rank = number};
    set_up(&rank, meeting);
    for (unsigned step = 1; step <= steps; step++) {
        if ((step * 7 + number) % LATE_EACH == 0) {
            usleep(number * 700);
        }
        if (number == ranks - 1) {
            job_pause_if_told();
        }
        step_of(&rank, step);
        uint64_t sum = hash_of(&rank, rank.mine) ^ hash_of(&rank, rank.scattered) * 3 ^ hash_of(&rank, rank.graphs) * 5;
        if (number == 0) {
            job_line(step, sum);
        } else {
            job_rest();
        }
        if (nccl_is_enough(step, rank.world, rank.enough, rank.first)) {
            break;
        }
    }
    rank.is_watched = 0;
    pthread_join(rank.watchdog, NULL);
    NCCL(ncclCommDestroy(rank.half));
    NCCL(ncclCommDestroy(rank.captured));
    NCCL(ncclCommDestroy(rank.world));
    return 0;
}

int main(int argc, char **argv) {
    int is_whole = argc == 3;
    steps = argc >= 3 ? (unsigned)atoi(argv[1]) : 0;
    ranks = argc >= 3 ? atoi(argv[2]) : 0;
    if (steps == 0 || ranks < 1 || ranks > MOST_RANKS || (!is_whole && argc != 6)) {
        fprintf(stderr, "usage: %s STEPS RANKS [FIRST COUNT FILE]\n", argv[0]);
        return 2;
    }
    if (is_whole) {
        return nccl_run(ranks, be_rank);
    }
    return nccl_run_part((struct part){.first = atoi(argv[3]), .count = atoi(argv[4]), .file = argv[5]}, be_rank);
}
