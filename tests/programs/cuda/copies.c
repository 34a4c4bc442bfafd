/* Two ranks that use two copies of NCCL: the one that the program is linked against, and one whose functions it looks
 * up. Groups of both are open at the same time, and a graph has collectives of both.
 *
 *   copies STEPS LIBRARY */
#include <dlfcn.h>

#include "nccl.h"

typedef struct CUgraph_st *CUgraph;
typedef struct CUgraphExec_st *CUgraphExec;
CUresult cuStreamBeginCapture_v2(CUstream stream, int mode);
CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph);
CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags);
CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream);

enum { RANKS = 2, COUNT = 96 };

static unsigned steps;
static void *library;

#define OTHER(name) ((typeof(&name))other(#name))

static void *other(const char *name) {
    void *function = dlsym(library, name);
    if (function == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
    return function;
}

static int be_rank(int rank, struct meeting *meeting) {
    struct job job = nccl_start(rank);
    CUstream stream;
    ncclComm_t ours, theirs;
    CUgraph graph;
    CUgraphExec exec;
    CHECK(cuStreamCreate(&stream, STREAM_NON_BLOCKING));
    nccl_meet(meeting, rank);
    NCCL(ncclCommInitRank(&ours, RANKS, meeting->ids[0], rank));
    NCCL(OTHER(ncclCommInitRank)(&theirs, RANKS, meeting->ids[1], rank));
    typeof(&ncclAllReduce) reduce = OTHER(ncclAllReduce);
    CUdeviceptr first = job_alloc(COUNT, rank + 1), second = job_alloc(COUNT, rank + 5);
    CHECK(cuStreamBeginCapture_v2(stream, 1));
    NCCL(reduce((void *)second, (void *)second, COUNT, UINT32, SUM, theirs, stream));
    NCCL(ncclAllReduce((void *)first, (void *)first, COUNT, UINT32, MAX, ours, stream));
    CHECK(cuStreamEndCapture(stream, &graph));
    CHECK(cuGraphInstantiateWithFlags(&exec, graph, 0));
    for (unsigned step = 1; step <= steps; step++) {
        job_mix(&job, first, COUNT, step + rank, stream);
        job_mix(&job, second, COUNT, step * 3 + rank, stream);
        NCCL(OTHER(ncclGroupStart)());
        NCCL(reduce((void *)second, (void *)second, COUNT, UINT32, SUM, theirs, stream));
        NCCL(ncclAllReduce((void *)first, (void *)first, COUNT, UINT32, SUM, ours, stream));
        NCCL(OTHER(ncclGroupEnd)());
        CHECK(cuGraphLaunch(exec, stream));
        NCCL(reduce((void *)first, (void *)first, COUNT, UINT32, SUM, theirs, stream));
        uint32_t words[2 * COUNT];
        CHECK(cuStreamSynchronize(stream));
        CHECK(cuMemcpyDtoH_v2(words, first, COUNT * 4));
        CHECK(cuMemcpyDtoH_v2(words + COUNT, second, COUNT * 4));
        if (rank == 0) {
            job_line(step, job_hash(0, words, 2 * COUNT));
        } else {
            job_rest();
        }
    }
    NCCL(OTHER(ncclCommDestroy)(theirs));
    NCCL(ncclCommDestroy(ours));
    return 0;
}

int main(int argc, char **argv) {
    steps = argc == 3 ? (unsigned)atoi(argv[1]) : 0;
    library = argc == 3 ? dlopen(argv[2], RTLD_NOW | RTLD_LOCAL) : NULL;
    if (steps == 0 || library == NULL) {
        fprintf(stderr, "usage: %s STEPS LIBRARY\n", argv[0]);
        return 2;
    }
    return nccl_run(RANKS, be_rank);
}
