/* graphs COUNT: launches a graph with an empty kernel and a captured all-reduce so often, and waits for all of a part
 * before the next; prints the seconds that each of 40 parts took. */
#include "nccl.h"

#define PARTS 40

static const char ptx[] = ".version 6.0\n.target sm_50\n.address_size 64\n.visible .entry nothing()\n{\n    ret;\n}\n";

int main(int count, char **arguments) {
    if (count != 2) {
        return 2;
    }
    long launches = atol(arguments[1]);
    void *context, *module, *function, *stream, *graph, *executable;
    CHECK(cuInit(0));
    CHECK(cuCtxCreate_v2(&context, 0, 0));
    CHECK(cuModuleLoadData(&module, ptx));
    CHECK(cuModuleGetFunction(&function, module, "nothing"));
    CHECK(cuStreamCreate(&stream, 1));
    ncclComm_t comm = of_two_ranks();
    CHECK(cuStreamBeginCapture_v2(stream, 1));
    CHECK(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL));
    CHECK(ncclAllReduce(NULL, NULL, 1, UINT32, SUM, comm, stream));
    CHECK(cuStreamEndCapture(stream, &graph));
    CHECK(cuGraphInstantiateWithFlags(&executable, graph, 0));
    for (int part = 0; part < PARTS; part++) {
        double begun_s = now_s();
        for (long launch = 0; launch < launches / PARTS; launch++) {
            CHECK(cuGraphLaunch(executable, stream));
        }
        CHECK(cuStreamSynchronize(stream));
        printf("%.9f\n", now_s() - begun_s);
    }
    return 0;
}
