/* Stream-ordered allocation, part by part: each prints the same whoever serves it.
 *
 *   stream_order PART
 *
 * The device is small, work begins late (SIMCUDA_JITTER), and memory passes from stream to stream all the time: whoever
 * hands out memory too early lets one stream overwrite what another has yet to read. How often memory was used again
 * goes to standard error. */
#include "../../../tests/programs/cuda/job.h"

#include <pthread.h>
#include <stdarg.h>

typedef struct CUmemPool_st *CUmemoryPool;
typedef struct CUgraph_st *CUgraph;
typedef struct CUgraphExec_st *CUgraphExec;

struct location {
    unsigned type;
    int id;
};
struct pool_properties {
    unsigned kind, handle_types;
    struct location location;
    void *win32;
    size_t most_bytes;
    unsigned short usage;
    unsigned char reserved[54];
};
struct access {
    struct location location;
    unsigned flags;
};

CUresult cuMemAllocAsync(CUdeviceptr *address, size_t bytes, CUstream stream);
CUresult cuMemAllocAsync_ptsz(CUdeviceptr *address, size_t bytes, CUstream stream);
CUresult cuMemAllocFromPoolAsync(CUdeviceptr *address, size_t bytes, CUmemoryPool pool, CUstream stream);
CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream);
CUresult cuMemFreeAsync_ptsz(CUdeviceptr address, CUstream stream);
CUresult cuMemPoolCreate(CUmemoryPool *pool, const struct pool_properties *properties);
CUresult cuMemPoolDestroy(CUmemoryPool pool);
CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t keep_bytes);
CUresult cuMemPoolGetAttribute(CUmemoryPool pool, unsigned attribute, void *value);
CUresult cuMemPoolSetAttribute(CUmemoryPool pool, unsigned attribute, void *value);
CUresult cuMemPoolSetAccess(CUmemoryPool pool, const struct access *access, size_t count);
CUresult cuMemPoolGetAccess(unsigned *flags, CUmemoryPool pool, struct location *location);
CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *pool, CUdevice device);
CUresult cuDeviceSetMemPool(CUdevice device, CUmemoryPool pool);
CUresult cuDeviceGetCount(int *count);
CUresult cuMemHostAlloc(void **memory, size_t bytes, unsigned flags);
CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream stream);
CUresult cuMemcpyDtoHAsync_v2_ptsz(void *to, CUdeviceptr from, size_t bytes, CUstream stream);
CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream stream);
CUresult cuMemsetD32Async_ptsz(CUdeviceptr to, unsigned value, size_t count, CUstream stream);
CUresult cuStreamSynchronize_ptsz(CUstream stream);
CUresult cuStreamDestroy_v2(CUstream stream);
CUresult cuStreamBeginCapture_v2(CUstream stream, unsigned mode);
CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph);
CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags);
CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream);
CUresult cuGraphExecDestroy(CUgraphExec exec);
CUresult cuGraphDestroy(CUgraph graph);
CUresult cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr address, unsigned value, unsigned flags);
CUresult cuPointerGetAttribute(void *value, unsigned attribute, CUdeviceptr address);
CUresult cuMemGetAddressRange_v2(CUdeviceptr *start, size_t *bytes, CUdeviceptr address);
CUresult cuCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice device);
CUresult cuCtxDestroy_v2(CUcontext context);
CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *address, void *memory, unsigned flags);

enum { THRESHOLD = 4, RESERVED = 5, RESERVED_HIGH = 6, USED = 7, USED_HIGH = 8 };
enum { GLOBAL = 0, THREAD_LOCAL = 1, RELAXED = 2 };
enum { MIB = 1 << 20 };

static CUdevice device;

static void fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    exit(1);
}

static const char *name_of(CUresult error) {
    const char *name = "?";
    cuGetErrorName(error, &name);
    return name;
}

static void says(const char *what, CUresult result) { printf("%s: %s\n", what, name_of(result)); }

static CUstream new_stream(void) {
    CUstream stream;
    CHECK(cuStreamCreate(&stream, STREAM_NON_BLOCKING));
    return stream;
}

static CUmemoryPool default_pool(void) {
    CUmemoryPool pool;
    CHECK(cuDeviceGetDefaultMemPool(&pool, device));
    return pool;
}

static CUmemoryPool new_pool(size_t most_bytes) {
    struct pool_properties properties = {.kind = 1, .location = {1, device}, .most_bytes = most_bytes};
    CUmemoryPool pool;
    CHECK(cuMemPoolCreate(&pool, &properties));
    return pool;
}

static unsigned long long number(CUmemoryPool pool, unsigned attribute) {
    unsigned long long value = 0;
    CHECK(cuMemPoolGetAttribute(pool, attribute, &value));
    return value;
}

static void keep(CUmemoryPool pool, unsigned long long bytes) {
    CHECK(cuMemPoolSetAttribute(pool, THRESHOLD, &bytes));
}

static unsigned long long next_random(unsigned long long *state) {
    *state = *state * 6364136223846793005ull + 1442695040888963407ull;
    return *state >> 33;
}

/* Memory that holds one value everywhere, and three words of it that were read back in a stream's order. */
struct probe {
    CUdeviceptr address;
    unsigned value;
    size_t count;
    CUstream stream;
    uint32_t *words;
    int is_pending;
};

static struct probe new_probe(void) {
    struct probe probe = {0};
    CHECK(cuMemHostAlloc((void **)&probe.words, 12, 0));
    return probe;
}

static void fill(struct probe *probe, CUdeviceptr address, size_t count, unsigned value, CUstream stream) {
    probe->address = address, probe->count = count, probe->value = value;
    CHECK(cuMemsetD32Async(address, value, count, stream));
}

static void read_back(struct probe *probe, CUstream stream) {
    CHECK(cuMemcpyDtoHAsync_v2(&probe->words[0], probe->address, 4, stream));
    CHECK(cuMemcpyDtoHAsync_v2(&probe->words[1], probe->address + probe->count / 2 * 4, 4, stream));
    CHECK(cuMemcpyDtoHAsync_v2(&probe->words[2], probe->address + (probe->count - 1) * 4, 4, stream));
    probe->stream = stream;
    probe->is_pending = 1;
}

static void verify(struct probe *probe) {
    for (unsigned i = 0; i < 3 && probe->is_pending; i++) {
        if (probe->words[i] != probe->value) {
            fail("%llx + %u/2: %u instead of %u", probe->address, i, probe->words[i], probe->value);
        }
    }
    probe->is_pending = 0;
}

/* ---- parts ---- */

enum { STREAMS = 4, LIVING = 24, STEPS = 600 };

/* Allocations of all sizes live for a while, are filled in one stream, read in another and freed in a third, which events
 * put in order. */
static void mix(void) {
    CUstream streams[STREAMS];
    CUevent events[STREAMS];
    struct probe living[LIVING];
    struct {
        CUdeviceptr start, end;
        int stream;
    } freed[STEPS];
    unsigned long long state = 1;
    unsigned again = 0, again_elsewhere = 0, count_freed = 0;
    for (unsigned i = 0; i < STREAMS; i++) {
        streams[i] = new_stream();
        CHECK(cuEventCreate(&events[i], 2));
    }
    for (unsigned i = 0; i < LIVING; i++) {
        living[i] = new_probe();
    }
    keep(default_pool(), ~0ull);
    for (unsigned step = 1; step <= STEPS; step++) {
        struct probe *probe = &living[next_random(&state) % LIVING];
        int first = next_random(&state) % STREAMS, second = next_random(&state) % STREAMS;
        unsigned long long size = next_random(&state);
        size_t bytes = step % 3 ? 4 + size % 4096 * 4 : 4 + size % (3 * MIB / 4) * 4;
        CUdeviceptr address;
        if (probe->is_pending) {
            CHECK(cuStreamSynchronize(probe->stream));
            verify(probe);
        }
        CHECK(cuMemAllocAsync(&address, bytes, streams[first]));
        for (int i = count_freed - 1; i >= 0; i--) {
            if (freed[i].start < address + bytes && address < freed[i].end) {
                again++;
                again_elsewhere += freed[i].stream != first;
                break;
            }
        }
        fill(probe, address, bytes / 4, step, streams[first]);
        if (first != second) {
            CHECK(cuEventRecord(events[first], streams[first]));
            CHECK(cuStreamWaitEvent(streams[second], events[first], 0));
        }
        read_back(probe, streams[second]);
        CHECK(cuMemFreeAsync(address, streams[second]));
        freed[count_freed].start = address, freed[count_freed].end = address + bytes;
        freed[count_freed++].stream = second;
    }
    for (unsigned i = 0; i < STREAMS; i++) {
        CHECK(cuStreamSynchronize(streams[i]));
    }
    for (unsigned i = 0; i < LIVING; i++) {
        verify(&living[i]);
    }
    printf("used at the end: %llu\n", number(default_pool(), USED));
    fprintf(stderr, "again %u elsewhere %u reserved %llu\n", again, again_elsewhere,
            number(default_pool(), RESERVED_HIGH));
}

/* There is room for one of them: each stream gets what the one before has freed and not yet got over. */
static void tight(void) {
    CUstream streams[3];
    struct probe probes[12];
    for (unsigned i = 0; i < 3; i++) {
        streams[i] = new_stream();
    }
    keep(default_pool(), ~0ull);
    for (unsigned i = 0; i < 12; i++) {
        CUstream stream = streams[i % 3];
        CUdeviceptr address;
        probes[i] = new_probe();
        CHECK(cuMemAllocAsync(&address, 40 * MIB, stream));
        fill(&probes[i], address, 10 * MIB, i + 1, stream);
        read_back(&probes[i], stream);
        CHECK(cuMemFreeAsync(address, stream));
    }
    CHECK(cuCtxSynchronize());
    for (unsigned i = 0; i < 12; i++) {
        verify(&probes[i]);
    }
    printf("at most twice: %d\n", number(default_pool(), RESERVED_HIGH) < 2 * 40 * MIB);
    CUdeviceptr address;
    says("more than there is", cuMemAllocAsync(&address, 80ul * MIB, streams[0]));
    says("far more than there is", cuMemAllocAsync(&address, ~0ul - 5, streams[0]));
    says("as before", cuMemAllocAsync(&address, 40 * MIB, streams[0]));
}

/* Many small ones from several streams, then one that takes most of their room: side by side if the pool has got its
 * memory at once, else here and there. */
static void scattered(int is_at_once) {
    enum { COUNT = 40 };
    CUstream streams[2] = {new_stream(), new_stream()};
    struct probe probes[COUNT], one = new_probe();
    CUdeviceptr address, elsewhere;
    keep(default_pool(), ~0ull);
    if (is_at_once) {
        CHECK(cuMemAllocAsync(&address, 48 * MIB, streams[0]));
        CHECK(cuMemFreeAsync(address, streams[0]));
        CHECK(cuStreamSynchronize(streams[0]));
    }
    for (unsigned i = 0; i < COUNT; i++) {
        probes[i] = new_probe();
        CHECK(cuMemAllocAsync(&address, MIB, streams[i % 2]));
        fill(&probes[i], address, MIB / 4, i + 1, streams[i % 2]);
    }
    CHECK(cuMemAllocAsync(&elsewhere, 4096, streams[0]));
    for (unsigned i = 0; i < 2 * COUNT; i++) {
        CHECK(cuMemsetD32Async(elsewhere, i, 1024, streams[0]));
    }
    for (unsigned i = 0; i < COUNT; i++) {
        read_back(&probes[i], streams[i % 2]);
        CHECK(cuMemFreeAsync(probes[i].address, streams[i % 2]));
    }
    /* The first stream has yet to read half of them, after much else. */
    CHECK(cuMemAllocAsync(&address, 30 * MIB, streams[1]));
    fill(&one, address, 30 * MIB / 4, 77, streams[1]);
    read_back(&one, streams[1]);
    CHECK(cuStreamSynchronize(streams[0]));
    CHECK(cuStreamSynchronize(streams[1]));
    for (unsigned i = 0; i < COUNT; i++) {
        verify(&probes[i]);
    }
    verify(&one);
    printf("used at the end: %llu\n", number(default_pool(), USED));
}

/* Work of one thread in its own default stream, by the symbols that mean it with 0. */
static void *in_own_stream(void *context) {
    struct probe probe;
    CHECK(cuCtxSetCurrent(context));
    probe = new_probe();
    for (unsigned step = 1; step <= 40; step++) {
        unsigned value = step + (unsigned)pthread_self();
        CUdeviceptr address;
        CHECK(cuMemAllocAsync_ptsz(&address, 64 << 10, NULL));
        CHECK(cuMemsetD32Async_ptsz(address, value, 16 << 10, NULL));
        probe.address = address, probe.count = 16 << 10, probe.value = value, probe.is_pending = 1;
        for (unsigned i = 0; i < 3; i++) {
            CHECK(cuMemcpyDtoHAsync_v2_ptsz(&probe.words[i], address + i * ((16 << 10) - 4), 4, NULL));
        }
        CHECK(cuMemFreeAsync_ptsz(address, NULL));
        if (step % 8 == 0) {
            CHECK(cuStreamSynchronize_ptsz(NULL));
            verify(&probe);
        }
    }
    CHECK(cuStreamSynchronize_ptsz(NULL));
    verify(&probe);
    return NULL;
}

static void threads(const struct job *job) {
    pthread_t threads[8];
    CUdeviceptr address;
    CHECK(cuMemAllocAsync(&address, MIB, NULL));
    for (unsigned i = 0; i < 8; i++) {
        pthread_create(&threads[i], NULL, in_own_stream, job->context);
    }
    for (unsigned i = 0; i < 8; i++) {
        pthread_join(threads[i], NULL);
    }
    CHECK(cuMemFreeAsync(address, NULL));
    CHECK(cuCtxSynchronize());
    printf("used at the end: %llu\n", number(default_pool(), USED));
}

static void *free_many(void *arguments) {
    CUdeviceptr *addresses = ((void **)arguments)[0];
    CUstream stream = ((void **)arguments)[1];
    unsigned long done = 0;
    CHECK(cuCtxSetCurrent(((void **)arguments)[2]));
    for (unsigned i = 0; i < 64; i++) {
        done += cuMemFreeAsync(addresses[i], stream) == 0;
    }
    return (void *)done;
}

/* Two threads free the same allocations: each is freed once. */
static void race(const struct job *job) {
    CUdeviceptr addresses[64];
    CUstream streams[2] = {new_stream(), new_stream()};
    pthread_t threads[2];
    unsigned long total = 0;
    for (unsigned i = 0; i < 64; i++) {
        CHECK(cuMemAllocAsync(&addresses[i], 4096, streams[0]));
    }
    CHECK(cuStreamSynchronize(streams[0]));
    void *arguments[2][3];
    for (unsigned i = 0; i < 2; i++) {
        arguments[i][0] = addresses, arguments[i][1] = streams[i], arguments[i][2] = job->context;
        pthread_create(&threads[i], NULL, free_many, arguments[i]);
    }
    for (unsigned i = 0; i < 2; i++) {
        void *done;
        pthread_join(threads[i], &done);
        total += (unsigned long)done;
    }
    printf("%lu freed\n", total);
}

static void *other_thread(void *context) {
    CUdeviceptr address;
    CUstream stream;
    CHECK(cuCtxSetCurrent(context));
    CHECK(cuStreamCreate(&stream, STREAM_NON_BLOCKING));
    for (unsigned i = 0; i < 20; i++) {
        CHECK(cuMemAllocAsync(&address, 3 * MIB, stream));
        CHECK(cuMemsetD32Async(address, i, 1024, stream));
        CHECK(cuMemFreeAsync(address, stream));
    }
    return NULL;
}

/* While a stream is captured, others go on, in this thread and in another. What is allocated in a capture is the
 * graph's. */
static void captured(const struct job *job, unsigned mode) {
    CUstream captured = new_stream(), plain = new_stream();
    CUdeviceptr ours, before, of_graph, address;
    CUgraph graph;
    CUgraphExec exec;
    pthread_t thread;
    CHECK(cuMemAllocAsync(&before, MIB, plain));
    CHECK(cuMemAllocAsync(&ours, 4096, plain));
    CHECK(cuStreamSynchronize(plain));
    CHECK(cuStreamBeginCapture_v2(captured, mode));
    for (unsigned i = 0; i < 20; i++) {
        CHECK(cuMemAllocAsync(&address, (i + 1) * MIB, plain));
        CHECK(cuMemsetD32Async(address, i, 1024, plain));
        CHECK(cuMemFreeAsync(address, plain));
    }
    CHECK(cuMemFreeAsync(before, plain));
    pthread_create(&thread, NULL, other_thread, job->context);
    pthread_join(thread, NULL);
    CHECK(cuMemAllocAsync(&of_graph, 4096, captured));
    CHECK(cuMemsetD32Async(of_graph, 5, 1024, captured));
    CHECK(cuMemFreeAsync(of_graph, captured));
    CHECK(cuStreamEndCapture(captured, &graph));
    CHECK(cuGraphInstantiateWithFlags(&exec, graph, 0));
    CHECK(cuGraphLaunch(exec, captured));
    CHECK(cuGraphLaunch(exec, captured));
    CHECK(cuStreamSynchronize(captured));
    says("memory of a graph that has freed it", cuMemFreeAsync(of_graph, plain));
    CHECK(cuGraphExecDestroy(exec));
    CHECK(cuGraphDestroy(graph));

    CHECK(cuStreamBeginCapture_v2(captured, mode));
    CHECK(cuMemAllocAsync(&of_graph, 4096, captured));
    CHECK(cuStreamEndCapture(captured, &graph));
    CHECK(cuGraphInstantiateWithFlags(&exec, graph, 0));
    CHECK(cuGraphLaunch(exec, captured));
    says("memory that a graph has left", cuMemFreeAsync(of_graph, captured));
    CHECK(cuStreamSynchronize(captured));

    CHECK(cuStreamBeginCapture_v2(captured, mode));
    says("memory of no graph, in a capture", cuMemFreeAsync(ours, captured));
    says("the end of that capture", cuStreamEndCapture(captured, &graph));
    CHECK(cuMemFreeAsync(ours, plain));
    CHECK(cuStreamSynchronize(plain));
}

static void errors(void) {
    CUstream stream = new_stream();
    CUmemoryPool pool = new_pool(4 * MIB), other;
    CUdeviceptr address, more, kept;
    says("0 bytes", cuMemAllocAsync(&address, 0, stream));
    says("nowhere to put it", cuMemAllocAsync(NULL, 1, stream));
    CHECK(cuMemAllocAsync(&address, 5000, stream));
    says("inside", cuMemFreeAsync(address + 512, stream));
    says("never allocated", cuMemFreeAsync(address + 64 * MIB, stream));
    says("address 0", cuMemFreeAsync(0, stream));
    says("free", cuMemFreeAsync(address, stream));
    says("free again", cuMemFreeAsync(address, stream));
    says("no pool", cuMemAllocFromPoolAsync(&address, 1, NULL, stream));
    CHECK(cuMemAllocFromPoolAsync(&kept, 3 * MIB, pool, stream));
    says("beyond the pool", cuMemAllocFromPoolAsync(&more, 3 * MIB, pool, stream));
    says("destroy", cuMemPoolDestroy(pool));
    says("from a destroyed pool", cuMemAllocFromPoolAsync(&more, 1, pool, stream));
    other = new_pool(0);
    CHECK(cuMemsetD32Async(kept, 1, 3 * MIB / 4, stream));
    CHECK(cuStreamSynchronize(stream));
    says("memory of a destroyed pool", cuMemFreeAsync(kept, stream));
    CHECK(cuStreamSynchronize(stream));
    says("again", cuMemFreeAsync(kept, stream));
    CHECK(cuMemAllocFromPoolAsync(&more, 1, other, stream));
    /* A free in another stream must come after the allocation. */
    CHECK(cuStreamSynchronize(stream));
    CHECK(cuStreamDestroy_v2(stream));
    stream = new_stream();
    says("in a stream that is none", cuMemAllocFromPoolAsync(&address, 1, other, (CUstream)0x77770));
    says("freed in a stream that is none", cuMemFreeAsync(more, (CUstream)0x77770));
    says("in another stream than that which is gone", cuMemFreeAsync(more, stream));
    CHECK(cuStreamSynchronize(stream));
    says("destroy the other", cuMemPoolDestroy(other));
}

/* A program that holds a stream back from the host must be able to go on allocating and freeing. */
static void held(void) {
    CUstream stream = new_stream(), other = new_stream();
    CUmemoryPool pool = default_pool();
    CUdeviceptr address, flag_address, more;
    volatile uint32_t *flag;
    CHECK(cuMemHostAlloc((void **)&flag, 4, 2));
    CHECK(cuMemHostGetDevicePointer_v2(&flag_address, (void *)flag, 0));
    *flag = 0;
    CHECK(cuMemAllocAsync(&address, 5 * MIB, stream));
    CHECK(cuMemsetD32Async(address, 1, MIB, stream));
    CHECK(cuStreamWaitValue32_v2(stream, flag_address, 1, 1));
    CHECK(cuMemFreeAsync(address, stream));
    CHECK(cuMemAllocAsync(&more, 5 * MIB, other));
    CHECK(cuMemsetD32Async(more, 1, MIB, other));
    CHECK(cuMemFreeAsync(more, other));
    CHECK(cuStreamSynchronize(other));
    if (more == address) {
        fail("memory was handed out before its free");
    }
    *flag = 1;
    CHECK(cuStreamSynchronize(stream));
    CHECK(cuStreamSynchronize(other));
    printf("reserved when all is done: %llu\n", number(pool, RESERVED));
}

/* Thresholds, trims, marks. */
static void books(void) {
    CUstream stream = new_stream();
    CUmemoryPool pool = new_pool(0);
    CUdeviceptr first, second;
    unsigned long long zero = 0;
    int off = 0, value = 7;
    keep(pool, 8 * MIB);
    printf("threshold %llu MiB\n", number(pool, THRESHOLD) / MIB);
    CHECK(cuMemAllocFromPoolAsync(&first, 40 * MIB, pool, stream));
    CHECK(cuMemAllocFromPoolAsync(&second, 6 * MIB, pool, stream));
    printf("used %llu MiB\n", number(pool, USED) / MIB);
    CHECK(cuMemFreeAsync(first, stream));
    CHECK(cuStreamSynchronize(stream));
    printf("used %llu MiB of at most %llu MiB\n", number(pool, USED) / MIB, number(pool, USED_HIGH) / MIB);
    printf("reserved below 40 MiB: %d\n", number(pool, RESERVED) < 40 * MIB);
    CHECK(cuMemPoolSetAttribute(pool, USED_HIGH, &zero));
    CHECK(cuMemPoolSetAttribute(pool, RESERVED_HIGH, &zero));
    printf("mark %llu MiB, below 40 MiB: %d\n", number(pool, USED_HIGH) / MIB,
           number(pool, RESERVED_HIGH) < 40 * MIB);
    CHECK(cuMemFreeAsync(second, stream));
    CHECK(cuStreamSynchronize(stream));
    CHECK(cuMemPoolTrimTo(pool, 0));
    printf("reserved %llu, used %llu\n", number(pool, RESERVED), number(pool, USED));
    CHECK(cuMemPoolSetAttribute(pool, 2, &off));
    CHECK(cuMemPoolGetAttribute(pool, 2, &value));
    printf("opportunistic %d\n", value);
    says("a mark other than 0", cuMemPoolSetAttribute(pool, USED_HIGH, &(unsigned long long){1}));
    says("current", cuMemPoolSetAttribute(pool, USED, &zero));
    CHECK(cuDeviceSetMemPool(device, pool));
    CHECK(cuMemAllocAsync(&first, MIB, stream));
    printf("used %llu MiB of the device's pool\n", number(pool, USED) / MIB);
    CHECK(cuMemFreeAsync(first, stream));
    CHECK(cuStreamSynchronize(stream));
    CHECK(cuMemPoolDestroy(pool));
}

/* Another device reads and writes what was there before it was given access, and what comes later. */
static void peers(const struct job *job) {
    struct access access = {{1, 1}, 3};
    CUcontext context;
    CUstream stream = new_stream(), far;
    CUmemoryPool pool = new_pool(0);
    CUdeviceptr before, after;
    uint32_t word = 0;
    CHECK(cuDevicePrimaryCtxRetain(&context, 1));
    CHECK(cuMemAllocFromPoolAsync(&before, MIB, pool, stream));
    CHECK(cuMemPoolSetAccess(pool, &access, 1));
    CHECK(cuMemAllocFromPoolAsync(&after, 40 * MIB, pool, stream));
    CHECK(cuStreamSynchronize(stream));
    CHECK(cuCtxSetCurrent(context));
    CHECK(cuStreamCreate(&far, STREAM_NON_BLOCKING));
    CHECK(cuMemsetD32Async(before, 11, 1024, far));
    CHECK(cuMemsetD32Async(after, 12, 1024, far));
    CHECK(cuStreamSynchronize(far));
    /* Freed on one device, used again on the other. */
    CHECK(cuMemFreeAsync(before, far));
    CHECK(cuCtxSetCurrent(job->context));
    CHECK(cuMemcpyDtoH_v2(&word, after, 4));
    printf("%u\n", word);
    CHECK(cuMemAllocFromPoolAsync(&before, MIB, pool, stream));
    CHECK(cuMemsetD32Async(before, 13, 1024, stream));
    CHECK(cuStreamSynchronize(stream));
    CHECK(cuMemcpyDtoH_v2(&word, before, 4));
    printf("%u\n", word);
    says("its own device", cuMemPoolSetAccess(pool, &(struct access){{1, 0}, 0}, 1));
}

/* Memory of cuMemAlloc that is freed in a stream's order, memory of a pool that cuMemFree frees. */
static void crossed(void) {
    CUstream stream = new_stream(), other = new_stream();
    struct probe probes[64], one = new_probe();
    CUdeviceptr address, start;
    size_t bytes;
    uintptr_t pool = 0, context = 1;
    unsigned ids[2] = {0, 0};
    for (unsigned i = 0; i < 64; i++) {
        size_t count = i % 4 ? 1024 : MIB;
        probes[i] = new_probe();
        CHECK(cuMemAlloc_v2(&address, count * 4));
        fill(&probes[i], address, count, i + 1, stream);
        read_back(&probes[i], stream);
        CHECK(cuMemFreeAsync(address, stream));
        if (i % 16 == 15) {
            says("again", cuMemFreeAsync(address, stream));
            says("again at once", cuMemFree_v2(address));
            CHECK(cuMemAllocAsync(&address, 4 * MIB, other));
            fill(&one, address, MIB, 1000 + i, other);
            CHECK(cuStreamSynchronize(stream));
        }
    }
    CHECK(cuCtxSynchronize());
    for (unsigned i = 0; i < 64; i++) {
        verify(&probes[i]);
    }
    CHECK(cuMemAllocAsync(&address, 5000, stream));
    CHECK(cuStreamSynchronize(stream));
    CHECK(cuPointerGetAttribute(&pool, 17, address + 4999));
    CHECK(cuPointerGetAttribute(&context, 1, address));
    CHECK(cuPointerGetAttribute(&ids[0], 10, address));
    CHECK(cuPointerGetAttribute(&ids[1], 9, address));
    CHECK(cuMemGetAddressRange_v2(&start, &bytes, address + 4000));
    printf("its pool %d, no context %d, IPC %u, device %u, whole %d, %zu bytes\n", pool == (uintptr_t)default_pool(),
           context == 0, ids[0], ids[1], start == address, bytes);
    says("free at once", cuMemFree_v2(address));
    says("free at once again", cuMemFree_v2(address));
    says("in order again", cuMemFreeAsync(address, stream));
    says("where it was", cuPointerGetAttribute(&pool, 17, address));
}

/* Contexts end with frees under way; the pool goes on. */
static void contexts(const struct job *job) {
    CUdeviceptr address;
    keep(default_pool(), ~0ull);
    for (unsigned round = 0; round < 6; round++) {
        CUcontext context;
        CUstream stream;
        struct probe probe;
        CHECK(cuCtxCreate_v2(&context, 0, device));
        CHECK(cuStreamCreate(&stream, STREAM_NON_BLOCKING));
        for (unsigned i = 0; i < 10; i++) {
            CHECK(cuMemAllocAsync(&address, 2 * MIB, stream));
            CHECK(cuMemsetD32Async(address, i, MIB / 2, stream));
            CHECK(cuMemFreeAsync(address, stream));
        }
        if (round % 2) {
            CHECK(cuStreamSynchronize(stream));
        }
        CHECK(cuCtxDestroy_v2(context));
        CHECK(cuCtxSetCurrent(job->context));
        probe = new_probe();
        stream = new_stream();
        CHECK(cuMemAllocAsync(&address, 3 * MIB, stream));
        fill(&probe, address, 3 * MIB / 4, round + 1, stream);
        read_back(&probe, stream);
        CHECK(cuMemFreeAsync(address, stream));
        CHECK(cuStreamSynchronize(stream));
        verify(&probe);
    }
    printf("used at the end: %llu\n", number(default_pool(), USED));
}

/* Calls of the driver fail now and then that the program itself does not make. */
static void troubled(void) {
    CUstream stream, other;
    struct probe probes[16];
    CHECK(cuStreamCreate(&stream, STREAM_NON_BLOCKING));
    CHECK(cuStreamCreate(&other, STREAM_NON_BLOCKING));
    for (unsigned step = 1; step <= 64; step++) {
        struct probe *probe = &probes[step % 16];
        CUstream now = step % 2 ? stream : other;
        CUdeviceptr address;
        if (step <= 16) {
            *probe = new_probe();
        }
        CHECK(cuStreamSynchronize(now));
        verify(probe);
        CHECK(cuMemAllocAsync(&address, step * 4096, now));
        fill(probe, address, step * 1024, step, now);
        read_back(probe, now);
        CHECK(cuMemFreeAsync(address, now));
    }
}

int main(int argc, char **argv) {
    const char *part = argc == 2 ? argv[1] : "";
    struct job job = job_start(2, (char *[]){argv[0], "1", NULL});
    if (strcmp(part, "mix") == 0) {
        mix();
    } else if (strcmp(part, "tight") == 0) {
        tight();
    } else if (strcmp(part, "scattered") == 0) {
        scattered(0);
    } else if (strcmp(part, "side by side") == 0) {
        scattered(1);
    } else if (strcmp(part, "threads") == 0) {
        threads(&job);
    } else if (strcmp(part, "race") == 0) {
        race(&job);
    } else if (strcmp(part, "captured") == 0) {
        captured(&job, GLOBAL);
        captured(&job, THREAD_LOCAL);
        captured(&job, RELAXED);
    } else if (strcmp(part, "errors") == 0) {
        errors();
    } else if (strcmp(part, "held") == 0) {
        held();
    } else if (strcmp(part, "books") == 0) {
        books();
    } else if (strcmp(part, "crossed") == 0) {
        crossed();
    } else if (strcmp(part, "contexts") == 0) {
        contexts(&job);
    } else if (strcmp(part, "troubled") == 0) {
        troubled();
    } else if (strcmp(part, "peers") == 0) {
        peers(&job);
    } else {
        fail("usage: %s PART", argv[0]);
    }
    return 0;
}
