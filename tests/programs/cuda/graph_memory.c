/* Graphs that allocate. One has allocated once and what it has lives as long as the job; the other one allocates and
 * frees at each launch. */
#include "job.h"

typedef struct CUgraph_st *CUgraph;
typedef struct CUgraphExec_st *CUgraphExec;
CUresult cuStreamBeginCapture_v2(CUstream stream, int mode);
CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph);
CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags);
CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream);
CUresult cuMemAllocAsync(CUdeviceptr *address, size_t bytes, CUstream stream);
CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream);
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream);

enum { COUNT = 256, BYTES = COUNT * 4 };

static CUgraphExec instantiate(CUstream stream) {
    CUgraph graph;
    CUgraphExec exec;
    CHECK(cuStreamEndCapture(stream, &graph));
    CHECK(cuGraphInstantiateWithFlags(&exec, graph, 0));
    return exec;
}

int main(int argc, char **argv) {
    struct job job = job_start(argc, argv);
    CUdeviceptr data = job_alloc(COUNT, 1), living, passing;
    CUstream stream;
    uint32_t words[COUNT];
    uint64_t sum = 0;
    CHECK(cuStreamCreate(&stream, STREAM_NON_BLOCKING));
    CHECK(cuStreamBeginCapture_v2(stream, 0));
    CHECK(cuMemAllocAsync(&living, BYTES, stream));
    CHECK(cuMemcpyDtoDAsync_v2(living, data, BYTES, stream));
    CHECK(cuGraphLaunch(instantiate(stream), stream));
    CHECK(cuStreamBeginCapture_v2(stream, 0));
    CHECK(cuMemAllocAsync(&passing, BYTES, stream));
    CHECK(cuMemcpyDtoDAsync_v2(passing, living, BYTES, stream));
    job_mix(&job, passing, COUNT, 5, stream);
    CHECK(cuMemcpyDtoDAsync_v2(data, passing, BYTES, stream));
    CHECK(cuMemFreeAsync(passing, stream));
    CUgraphExec exec = instantiate(stream);
    for (unsigned step = 1; step <= job.steps; step++) {
        job_mix(&job, living, COUNT, step, stream);
        CHECK(cuGraphLaunch(exec, stream));
        CHECK(cuStreamSynchronize(stream));
        CHECK(cuMemcpyDtoH_v2(words, data, BYTES));
        sum = job_hash(sum, words, COUNT);
        job_line(step, sum);
    }
    return 0;
}
