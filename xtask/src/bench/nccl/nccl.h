/* What the programs here use of NCCL and of the CUDA driver. */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define CHECK(call)                                                                                                    \
    do {                                                                                                               \
        int result = (call);                                                                                           \
        if (result != 0) {                                                                                             \
            fprintf(stderr, "%s: %d\n", #call, result);                                                                \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

typedef struct ncclComm *ncclComm_t;
typedef struct {
    char internal[128];
} ncclUniqueId;
enum { UINT32 = 3, SUM = 0 };
int ncclGetUniqueId(ncclUniqueId *id);
int ncclCommInitRank(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank);
int ncclAllReduce(const void *send, void *recv, size_t elements, int type, int op, ncclComm_t comm, void *stream);
int ncclSend(const void *send, size_t elements, int type, int to, ncclComm_t comm, void *stream);
int ncclRecv(void *recv, size_t elements, int type, int from, ncclComm_t comm, void *stream);
int ncclGroupStart(void);
int ncclGroupEnd(void);

int cuInit(unsigned flags);
int cuCtxCreate_v2(void **context, unsigned flags, int device);
int cuMemAlloc_v2(unsigned long long *address, size_t bytes);
int cuModuleLoadData(void **module, const void *image);
int cuModuleGetFunction(void **function, void *module, const char *name);
int cuStreamCreate(void **stream, unsigned flags);
int cuStreamSynchronize(void *stream);
int cuStreamBeginCapture_v2(void *stream, int mode);
int cuStreamEndCapture(void *stream, void **graph);
int cuGraphInstantiateWithFlags(void **executable, void *graph, unsigned long long flags);
int cuGraphLaunch(void *executable, void *stream);
int cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned shared_bytes, void *stream, void **params,
                   void **extra);

static inline double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* A communicator of two ranks, for NCCL that does not need the other one. */
static inline ncclComm_t of_two_ranks(void) {
    ncclUniqueId id;
    ncclComm_t comm;
    CHECK(ncclGetUniqueId(&id));
    CHECK(ncclCommInitRank(&comm, 2, id, 0));
    return comm;
}
