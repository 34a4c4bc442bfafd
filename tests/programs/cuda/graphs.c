/* Captures graphs and launches them: copies, kernels and a memset on two streams that fork and join. One graph lives
 * as long as the job; the other one is captured anew every few steps. */
#include "job.h"

typedef struct CUgraph_st *CUgraph;
typedef struct CUgraphExec_st *CUgraphExec;
CUresult cuStreamBeginCapture_v2(CUstream stream, int mode);
CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph);
CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags);
CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream);
CUresult cuGraphExecDestroy(CUgraphExec exec);
CUresult cuGraphDestroy(CUgraph graph);
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, CUstream stream);
CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream stream);
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream);
CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream stream);

enum { COUNT = 256, BYTES = COUNT * 4, CAPTURED_ANEW = 7 };

static uint32_t input[COUNT], output[COUNT];

static CUgraphExec instantiate(CUstream stream) {
    CUgraph graph;
    CUgraphExec exec;
    CHECK(cuStreamEndCapture(stream, &graph));
    CHECK(cuGraphInstantiateWithFlags(&exec, graph, 0));
    CHECK(cuGraphDestroy(graph));
    return exec;
}

/* data is mixed, while a copy of scratch goes to the second stream and is mixed there. */
static CUgraphExec forking(const struct job *job, CUdeviceptr data, CUdeviceptr scratch, CUstream stream[2],
                           CUevent event[2]) {
    CHECK(cuStreamBeginCapture_v2(stream[0], 0));
    CHECK(cuEventRecord(event[0], stream[0]));
    CHECK(cuStreamWaitEvent(stream[1], event[0], 0));
    CHECK(cuMemcpyHtoDAsync_v2(scratch, input, BYTES, stream[1]));
    job_mix(job, scratch, COUNT, 5, stream[1]);
    job_mix(job, data, COUNT, 11, stream[0]);
    CHECK(cuEventRecord(event[1], stream[1]));
    CHECK(cuStreamWaitEvent(stream[0], event[1], 0));
    CHECK(cuMemcpyDtoHAsync_v2(output, scratch, BYTES, stream[0]));
    return instantiate(stream[0]);
}

static CUgraphExec short_lived(const struct job *job, CUdeviceptr data, CUdeviceptr other, unsigned salt,
                               CUstream stream) {
    CHECK(cuStreamBeginCapture_v2(stream, 0));
    CHECK(cuMemcpyDtoDAsync_v2(other, data, BYTES / 2, stream));
    CHECK(cuMemsetD32Async(other + BYTES / 2, salt, COUNT / 4, stream));
    job_mix(job, other, COUNT, salt, stream);
    return instantiate(stream);
}

int main(int argc, char **argv) {
    struct job job = job_start(argc, argv);
    CUdeviceptr data = job_alloc(COUNT, 1), other = job_alloc(COUNT, 2), scratch = job_alloc(COUNT, 3);
    CUstream stream[2];
    CUevent event[2];
    CUgraphExec second = NULL;
    uint64_t sum = 0;
    uint32_t words[COUNT];
    for (int i = 0; i < 2; i++) {
        CHECK(cuStreamCreate(&stream[i], STREAM_NON_BLOCKING));
        CHECK(cuEventCreate(&event[i], 0));
    }
    CUgraphExec first = forking(&job, data, scratch, stream, event);
    for (unsigned step = 1; step <= job.steps; step++) {
        input[step % COUNT] = step;
        if (step % CAPTURED_ANEW == 1) {
            if (second != NULL) {
                CHECK(cuGraphExecDestroy(second));
            }
            second = short_lived(&job, data, other, step, stream[0]);
        }
        CHECK(cuGraphLaunch(first, stream[0]));
        CHECK(cuGraphLaunch(second, stream[0]));
        CHECK(cuStreamSynchronize(stream[0]));
        sum = job_hash(sum, output, COUNT);
        CHECK(cuMemcpyDtoH_v2(words, other, BYTES));
        sum = job_hash(sum, words, COUNT);
        job_line(step, sum);
    }
    return 0;
}
