/* A program that keeps the GPU from standing still for as long as it is told to.
 *
 *   stalls wait      a stream waits for a value that the host writes later
 *   stalls capture   a stream is being captured
 *   stalls thread    the same for the thread's own default stream
 *   stalls hog       takes all memory that is left as soon as the file `take` is there, and keeps it
 *
 * The stall begins when the file `stall` is there and ends when it is gone; `stalled` says that it has begun. The
 * program prints a line every 10 ms, and ends when the file `end` is there, after a look at what the GPU has done.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUgraph_st *CUgraph;
typedef struct CUgraphExec_st *CUgraphExec;
CUresult cuInit(unsigned flags);
CUresult cuDeviceGet(CUdevice *device, int ordinal);
CUresult cuCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice device);
CUresult cuCtxSynchronize(void);
CUresult cuStreamCreate(CUstream *stream, unsigned flags);
CUresult cuStreamSynchronize(CUstream stream);
CUresult cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr address, uint32_t value, unsigned flags);
CUresult cuStreamBeginCapture_v2(CUstream stream, int mode);
CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph);
CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags);
CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream);
CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes);
CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes);
CUresult cuMemsetD32_v2(CUdeviceptr to, unsigned value, size_t count);
CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream stream);

#define NON_BLOCKING 1u
#define CAPTURE_RELAXED 2
#define PER_THREAD ((CUstream)2)
#define WORDS 1024
#define CHECK(call)                                                                                                    \
    do {                                                                                                               \
        CUresult error_ = (call);                                                                                      \
        if (error_ != 0) {                                                                                             \
            fprintf(stderr, "stalls: %s: error %d\n", #call, error_);                                                  \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

static CUstream stream, other;
static CUdeviceptr flag, words;

static int is_there(const char *file) { return access(file, F_OK) == 0; }

static void touch(const char *file) {
    FILE *made = fopen(file, "w");
    if (made == NULL) {
        perror(file);
        exit(1);
    }
    fclose(made);
}

static void begin_stall(int waits) {
    if (waits) {
        CHECK(cuStreamWaitValue32_v2(stream, flag, 1, 0));
        CHECK(cuMemsetD32Async(words, 7, WORDS, stream));
    } else {
        CHECK(cuStreamBeginCapture_v2(stream, CAPTURE_RELAXED));
        CHECK(cuMemsetD32Async(words, 7, WORDS, stream));
    }
}

static void end_stall(int waits) {
    if (waits) {
        CHECK(cuMemsetD32Async(flag, 1, 1, other));
    } else {
        CUgraph graph;
        CUgraphExec exec;
        CHECK(cuStreamEndCapture(stream, &graph));
        CHECK(cuGraphInstantiateWithFlags(&exec, graph, 0));
        CHECK(cuGraphLaunch(exec, stream));
    }
    CHECK(cuStreamSynchronize(stream));
}

/* All words of the GPU's are `expected`. */
static void look(uint32_t expected) {
    static uint32_t host[WORDS];
    CHECK(cuMemcpyDtoH_v2(host, words, sizeof host));
    for (int i = 0; i < WORDS; i++) {
        if (host[i] != expected) {
            fprintf(stderr, "stalls: word %d is %u and not %u\n", i, host[i], expected);
            exit(1);
        }
    }
}

static void hog(void) {
    while (!is_there("end")) {
        CUdeviceptr address;
        if (is_there("take") && !is_there("taken")) {
            for (size_t bytes = 1u << 30; bytes >= 4096; bytes /= 2) {
                while (cuMemAlloc_v2(&address, bytes) == 0) {
                }
            }
            touch("taken");
        }
        usleep(10000);
    }
}

int main(int count, char **arguments) {
    if (count != 2) {
        return 2;
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    int waits = strcmp(arguments[1], "wait") == 0, stalls = 0;
    uint32_t expected = 5;
    CUdevice device;
    CUcontext context;
    CHECK(cuInit(0));
    CHECK(cuDeviceGet(&device, 0));
    CHECK(cuCtxCreate_v2(&context, 0, device));
    if (strcmp(arguments[1], "hog") == 0) {
        hog();
        return 0;
    }
    CHECK(cuStreamCreate(&stream, NON_BLOCKING));
    CHECK(cuStreamCreate(&other, NON_BLOCKING));
    if (strcmp(arguments[1], "thread") == 0) {
        stream = PER_THREAD;
    }
    CHECK(cuMemAlloc_v2(&flag, sizeof(uint32_t)));
    CHECK(cuMemAlloc_v2(&words, WORDS * sizeof(uint32_t)));
    CHECK(cuMemsetD32_v2(flag, 0, 1));
    CHECK(cuMemsetD32_v2(words, expected, WORDS));
    CHECK(cuCtxSynchronize());
    for (long line = 0; !is_there("end"); line++) {
        printf("line %ld\n", line);
        if (!stalls && is_there("stall")) {
            begin_stall(waits);
            stalls = 1;
            touch("stalled");
        } else if (stalls && !is_there("stall")) {
            end_stall(waits);
            stalls = 0;
            expected = 7;
            touch("over");
        }
        if (!stalls) {
            look(expected);
        }
        usleep(10000);
    }
    look(expected);
    printf("right\n");
    return 0;
}
