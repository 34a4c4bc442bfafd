/* Graphs that allocate on a device whose memory a pool holds without using it. Each step is told with its result, and
 * with how many MiB the pool holds after it. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned long long ptr;
typedef void *handle;

int cuInit(unsigned);
int cuDevicePrimaryCtxRetain(handle *, int);
int cuCtxSetCurrent(handle);
int cuStreamCreate(handle *, unsigned);
int cuStreamSynchronize(handle);
int cuMemAllocAsync(ptr *, size_t, handle);
int cuMemFreeAsync(ptr, handle);
int cuDeviceGetDefaultMemPool(handle *, int);
int cuMemPoolSetAttribute(handle, int, void *);
int cuMemPoolGetAttribute(handle, int, void *);
int cuStreamBeginCapture_v2(handle, int);
int cuStreamEndCapture(handle, handle *);
int cuGraphCreate(handle *, unsigned);
int cuGraphAddMemAllocNode(handle *, handle, const handle *, size_t, void *);
int cuGraphAddMemFreeNode(handle *, handle, const handle *, size_t, ptr);
int cuGraphAddNode_v2(handle *, handle, const handle *, const void *, size_t, void *);
int cuGraphInstantiateWithFlags(handle *, handle, unsigned long long);
int cuGraphInstantiateWithParams(handle *, handle, void *);
int cuGraphUpload(handle, handle);
int cuGraphLaunch(handle, handle);
int cuGraphExecDestroy(handle);
int cuDeviceGraphMemTrim(int);

#define MIB ((size_t)1 << 20)
#define OK(call)                                                   \
    do {                                                           \
        int code_ = (call);                                        \
        if (code_ != 0) {                                          \
            printf("line %d: %s: %d\n", __LINE__, #call, code_);   \
            exit(1);                                               \
        }                                                          \
    } while (0)

/* CUDA driver API reference, CUDA_MEM_ALLOC_NODE_PARAMS and CUgraphNodeParams. */
struct allocation {
    struct { unsigned type, handles, place; int id; void *win32; size_t most; unsigned char reserved[56]; } pool;
    const void *access;
    size_t access_count, bytes;
    ptr address;
};
struct parameters {
    unsigned type, reserved0[3];
    union { struct allocation allocation; unsigned char bytes[232]; } of;
    long long reserved2;
};
struct instantiation { unsigned long long flags; handle stream, node; int result; };

static handle stream, pool;

static uint64_t held(void) {
    uint64_t bytes = 0;
    OK(cuMemPoolGetAttribute(pool, 5, &bytes));
    return bytes / MIB;
}

static int tell(const char *step, int result) {
    printf("%s %d, the pool holds %d\n", step, result, (int)held());
    fflush(stdout);
    return result;
}

/* The pool takes so much of the device, and nothing uses it. */
static void hold(size_t bytes) {
    ptr address;
    OK(cuMemAllocAsync(&address, bytes, stream));
    OK(cuMemFreeAsync(address, stream));
    OK(cuStreamSynchronize(stream));
    tell("hold", 0);
}

static struct allocation of(size_t bytes) {
    struct allocation allocation = {{1, 0, 1, 0, NULL, 0, {0}}, NULL, 0, bytes, 0};
    return allocation;
}

/* A graph that allocates and frees. */
static handle graph_with(size_t bytes) {
    handle graph, nodes[2];
    struct allocation allocation = of(bytes);
    OK(cuGraphCreate(&graph, 0));
    OK(cuGraphAddMemAllocNode(&nodes[0], graph, NULL, 0, &allocation));
    OK(cuGraphAddMemFreeNode(&nodes[1], graph, nodes, 1, allocation.address));
    return graph;
}

static handle executable_of(handle graph) {
    handle executable = NULL;
    OK(cuGraphInstantiateWithFlags(&executable, graph, 0));
    return executable;
}

static void nodes(void) {
    handle graph, node;
    struct allocation allocation = of(40 * MIB);
    OK(cuGraphCreate(&graph, 0));
    hold(40 * MIB);
    tell("node", cuGraphAddMemAllocNode(&node, graph, NULL, 0, &allocation));
    /* Nothing is left to be given back. */
    tell("node", cuGraphAddMemAllocNode(&node, graph, NULL, 0, &allocation));
}

static void any_node(void) {
    handle graph, node;
    struct parameters parameters = {10, {0}, {of(40 * MIB)}, 0};
    OK(cuGraphCreate(&graph, 0));
    hold(40 * MIB);
    tell("node", cuGraphAddNode_v2(&node, graph, NULL, NULL, 0, &parameters));
}

static void captured(void) {
    handle graph, executable;
    ptr address;
    hold(40 * MIB);
    OK(cuStreamBeginCapture_v2(stream, 0));
    tell("allocation", cuMemAllocAsync(&address, 40 * MIB, stream));
    tell("free", cuMemFreeAsync(address, stream));
    tell("end", cuStreamEndCapture(stream, &graph));
    executable = executable_of(graph);
    tell("launch", cuGraphLaunch(executable, stream));
    OK(cuStreamSynchronize(stream));
}

static void first_uses(void) {
    handle graph = graph_with(16 * MIB), launched = executable_of(graph), other = executable_of(graph_with(8 * MIB));
    hold(32 * MIB);
    tell("launch", cuGraphLaunch(launched, stream));
    OK(cuStreamSynchronize(stream));
    hold(32 * MIB);
    tell("launch again", cuGraphLaunch(launched, stream));
    OK(cuStreamSynchronize(stream));
    tell("upload", cuGraphUpload(other, stream));
    OK(cuStreamSynchronize(stream));
    OK(cuDeviceGraphMemTrim(0));
    hold(32 * MIB);
    tell("launch after a trim", cuGraphLaunch(launched, stream));
    OK(cuStreamSynchronize(stream));
    OK(cuGraphExecDestroy(launched));
    hold(32 * MIB);
    struct instantiation parameters = {0, NULL, NULL, 0};
    tell("instantiate", cuGraphInstantiateWithParams(&launched, graph, &parameters));
}

/* The driver fails for want of memory, by a fault. */
static void short_of_memory(const char *what) {
    handle graph, executable = NULL;
    int is_upload = strcmp(what, "upload") == 0;
    OK(cuGraphCreate(&graph, 0));
    if (strcmp(what, "instantiate") != 0) {
        OK(cuGraphInstantiateWithFlags(&executable, graph, 0));
    }
    hold(8 * MIB);
    if (executable == NULL) {
        tell(what, cuGraphInstantiateWithFlags(&executable, graph, 0));
    } else {
        tell(what, is_upload ? cuGraphUpload(executable, stream) : cuGraphLaunch(executable, stream));
    }
}

int main(int argc, char **argv) {
    handle context;
    uint64_t all = UINT64_MAX;
    if (argc < 2) {
        return 2;
    }
    OK(cuInit(0));
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxSetCurrent(context));
    OK(cuStreamCreate(&stream, 1));
    OK(cuDeviceGetDefaultMemPool(&pool, 0));
    OK(cuMemPoolSetAttribute(pool, 4, &all));
    if (strcmp(argv[1], "nodes") == 0) {
        nodes();
    } else if (strcmp(argv[1], "any-node") == 0) {
        any_node();
    } else if (strcmp(argv[1], "captured") == 0) {
        captured();
    } else if (strcmp(argv[1], "first-uses") == 0) {
        first_uses();
    } else {
        short_of_memory(argv[1]);
    }
    return 0;
}
