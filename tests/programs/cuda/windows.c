/* Ranks that register memory with NCCL: windows, which all ranks register together and each ends when it likes, and buffers
 * of one rank. They are registered again in each step, some on other memory than before, and collectives read and write
 * them, one of them in a graph.
 *
 *   windows STEPS RANKS
 *
 * The first process starts the ranks, and ends with 1 as soon as one has failed. Rank 0 prints a line for each step, with
 * a checksum over the memory of all ranks. As soon as there is a file `enough`, they end after one of the next steps. */
#include "nccl.h"

typedef struct ncclWindow *ncclWindow_t;
int ncclMemAlloc(void **memory, size_t bytes);
int ncclMemFree(void *memory);
int ncclCommRegister(ncclComm_t comm, void *memory, size_t bytes, void **handle);
int ncclCommDeregister(ncclComm_t comm, void *handle);
int ncclCommWindowRegister(ncclComm_t comm, void *memory, size_t bytes, ncclWindow_t *window, int flags);
int ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window);

typedef struct CUgraph_st *CUgraph;
typedef struct CUgraphExec_st *CUgraphExec;
CUresult cuStreamBeginCapture_v2(CUstream stream, int mode);
CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph);
CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags);
CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream);

enum { COUNT = 2400, BYTES = 2 << 20, DEFAULT_FLAGS = 0, SYMMETRIC = 1, MEMORY_EACH = 3, HASHED = 512 };

static unsigned steps;
static int ranks;

struct rank {
    struct job job;
    int rank;
    CUstream stream;
    ncclComm_t comm;
    /* What the windows of all steps are on; what those of the graph are on; memory of no window. */
    uint32_t *from, *to, *graph_from, *graph_to;
    CUdeviceptr plain, all, enough;
    ncclWindow_t window_from, window_to, window_graph_from, window_graph_to;
    CUgraphExec graph;
};

static uint32_t *allocate(struct rank *rank, unsigned salt) {
    void *memory;
    NCCL(ncclMemAlloc(&memory, BYTES));
    CHECK(cuMemsetD32_v2((CUdeviceptr)memory, salt + rank->rank, BYTES / 4));
    CHECK(cuStreamSynchronize(NULL));
    return memory;
}

static ncclWindow_t window_on(struct rank *rank, void *memory, int flags) {
    ncclWindow_t window;
    NCCL(ncclCommWindowRegister(rank->comm, memory, BYTES, &window, flags));
    return window;
}

static void set_up(struct rank *rank, struct meeting *meeting) {
    CUgraph graph;
    rank->job = nccl_start(rank->rank);
    CHECK(cuStreamCreate(&rank->stream, STREAM_NON_BLOCKING));
    nccl_meet(meeting, rank->rank);
    NCCL(ncclCommInitRank(&rank->comm, ranks, meeting->ids[0], rank->rank));
    rank->from = allocate(rank, 3);
    rank->to = allocate(rank, 5);
    rank->graph_from = allocate(rank, 7);
    rank->graph_to = allocate(rank, 9);
    rank->enough = job_alloc(1, 0);
    rank->plain = job_alloc(COUNT, rank->rank + 1);
    rank->all = job_alloc(HASHED * 3 * MOST_RANKS, 0);
    rank->window_graph_from = window_on(rank, rank->graph_from, SYMMETRIC);
    rank->window_graph_to = window_on(rank, rank->graph_to, SYMMETRIC);
    CHECK(cuStreamBeginCapture_v2(rank->stream, 1));
    job_mix(&rank->job, (CUdeviceptr)rank->graph_from, COUNT, rank->rank, rank->stream);
    NCCL(ncclAllReduce(rank->graph_from, rank->graph_to, COUNT, UINT32, SUM, rank->comm, rank->stream));
    job_mix(&rank->job, (CUdeviceptr)rank->graph_to, COUNT, 1, rank->stream);
    CHECK(cuStreamEndCapture(rank->stream, &graph));
    CHECK(cuGraphInstantiateWithFlags(&rank->graph, graph, 0));
}

/* Windows of this step, in a group every other time. */
static void begin(struct rank *rank, unsigned step) {
    int flags = step % 4 == 3 ? DEFAULT_FLAGS : SYMMETRIC;
    if (step % 2 == 0) {
        NCCL(ncclGroupStart());
    }
    NCCL(ncclCommWindowRegister(rank->comm, rank->from, BYTES, &rank->window_from, flags));
    NCCL(ncclCommWindowRegister(rank->comm, rank->to, BYTES, &rank->window_to, flags));
    if (step % 2 == 0) {
        NCCL(ncclGroupEnd());
    }
}

static void end(struct rank *rank) {
    NCCL(ncclCommWindowDeregister(rank->comm, rank->window_from));
    NCCL(ncclCommWindowDeregister(rank->comm, rank->window_to));
}

/* A buffer that this rank registers alone, for one collective on it. */
static void use_buffer(struct rank *rank) {
    void *handle;
    NCCL(ncclCommRegister(rank->comm, (void *)rank->plain, COUNT * 4, &handle));
    NCCL(ncclAllReduce((void *)rank->plain, (void *)rank->plain, COUNT, UINT32, MAX, rank->comm, rank->stream));
    CHECK(cuStreamSynchronize(rank->stream));
    NCCL(ncclCommDeregister(rank->comm, handle));
}

static void step_of(struct rank *rank, unsigned step) {
    int ends_early = (step + rank->rank) % 2;
    size_t part = COUNT / ranks, offset = step % 5 * 1024;
    uint32_t *from = rank->from + offset, *to = rank->to + 2 * offset;
    begin(rank, step);
    job_mix(&rank->job, (CUdeviceptr)from, COUNT, step, rank->stream);
    NCCL(ncclReduceScatter(from, to, part, UINT32, SUM, rank->comm, rank->stream));
    job_mix(&rank->job, (CUdeviceptr)from, COUNT, step * 3, rank->stream);
    NCCL(ncclAllReduce(from, to + COUNT, COUNT, UINT32, SUM, rank->comm, rank->stream));
    NCCL(ncclAllGather(from, to, part, UINT32, rank->comm, rank->stream));
    NCCL(ncclAllReduce(from, from, COUNT, UINT32, MAX, rank->comm, rank->stream));
    CHECK(cuStreamSynchronize(rank->stream));
    if (ends_early) {
        end(rank);
    }
    job_mix(&rank->job, rank->plain, COUNT, step + rank->rank, rank->stream);
    use_buffer(rank);
    CHECK(cuGraphLaunch(rank->graph, rank->stream));
    CHECK(cuStreamSynchronize(rank->stream));
    if (!ends_early) {
        end(rank);
    }
    if (step % MEMORY_EACH == 0) {
        NCCL(ncclMemFree(rank->from));
        rank->from = allocate(rank, step);
    }
}

/* Of some words of each buffer, on all ranks. */
static uint64_t hash_of(struct rank *rank) {
    static uint32_t words[HASHED * 3 * MOST_RANKS];
    CUdeviceptr parts[] = {(CUdeviceptr)(rank->to + COUNT), (CUdeviceptr)rank->graph_to, rank->plain};
    uint64_t sum = 1;
    for (int i = 0; i < 3; i++) {
        CUdeviceptr to = rank->all + i * HASHED * 4ul * ranks;
        NCCL(ncclAllGather((void *)parts[i], (void *)to, HASHED, UINT32, rank->comm, rank->stream));
    }
    CHECK(cuStreamSynchronize(rank->stream));
    CHECK(cuMemcpyDtoH_v2(words, rank->all, HASHED * 3 * 4ul * ranks));
    return job_hash(sum, words, HASHED * 3 * ranks);
}

static int be_rank(int number, struct meeting *meeting) {
    struct rank rank = {.rank = number};
    set_up(&rank, meeting);
    for (unsigned step = 1; step <= steps; step++) {
        step_of(&rank, step);
        uint64_t sum = hash_of(&rank);
        if (number == 0) {
            job_line(step, sum);
        } else {
            job_rest();
        }
        if (nccl_is_enough(step, rank.comm, rank.enough, rank.stream)) {
            break;
        }
    }
    NCCL(ncclCommWindowDeregister(rank.comm, rank.window_graph_from));
    NCCL(ncclCommWindowDeregister(rank.comm, rank.window_graph_to));
    NCCL(ncclCommDestroy(rank.comm));
    return 0;
}

int main(int argc, char **argv) {
    steps = argc == 3 ? (unsigned)atoi(argv[1]) : 0;
    ranks = argc == 3 ? atoi(argv[2]) : 0;
    if (steps == 0 || ranks < 2 || ranks > MOST_RANKS) {
        fprintf(stderr, "usage: %s STEPS RANKS\n", argv[0]);
        return 2;
    }
    return nccl_run(ranks, be_rank);
}
