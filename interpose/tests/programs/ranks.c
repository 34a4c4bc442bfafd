// A rank that communicates until the file STOP is there, and checks every result.
// usage: ranks RANK RANKS DIRECTORY WAY (the ways: plain, groups, graphs, nonblocking, windows)
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { COUNT = 1024, FLOAT = 7, SUM = 0, IN_PROGRESS = 7 };

typedef struct {
    char internal[128];
} id;
typedef struct {
    size_t size;
    unsigned magic, version;
    int blocking, more[3];
    const char *name;
    int share;
} config;

extern int cuInit(unsigned), cuDeviceGet(int *, int), cuDevicePrimaryCtxRetain(void **, int), cuCtxSetCurrent(void *);
extern int cuMemAlloc_v2(uint64_t *, size_t), cuStreamCreate(void **, unsigned), cuStreamSynchronize(void *);
extern int cuMemcpyHtoD_v2(uint64_t, const void *, size_t), cuMemcpyDtoH_v2(void *, uint64_t, size_t);
extern int cuStreamBeginCapture_v2(void *, int), cuStreamEndCapture(void *, void **);
extern int cuGraphInstantiateWithFlags(void **, void *, unsigned long long), cuGraphLaunch(void *, void *);
extern int cuGraphDestroy(void *);
extern int ncclGetUniqueId(id *), ncclCommInitRank(void **, int, id, int), ncclCommDestroy(void *);
extern int ncclCommInitRankConfig(void **, int, id, int, config *), ncclCommGetAsyncError(void *, int *);
extern int ncclCommSplit(void *, int, int, void **, config *), ncclGroupStart(void), ncclGroupEnd(void);
extern int ncclAllReduce(uint64_t, uint64_t, size_t, int, int, void *, void *);
extern int ncclCommWindowRegister(void *, uint64_t, size_t, void **, int), ncclCommWindowDeregister(void *, void *);
extern int ncclBroadcast(uint64_t, uint64_t, size_t, int, int, void *, void *);
extern int ncclSend(uint64_t, size_t, int, int, void *, void *), ncclRecv(uint64_t, size_t, int, int, void *, void *);

static int rank, ranks;
static const char *directory;
static void *world, *part, *first, *second, *graph;
static uint64_t from, to, other, flag;
static float host[COUNT];

static void check(int result, const char *what)
{
    if (result) {
        fprintf(stderr, "rank %d: %s failed with %d\n", rank, what, result);
        exit(1);
    }
}
#define CHECK(call) check(call, #call)

static void expect(uint64_t place, float value, const char *what)
{
    CHECK(cuMemcpyDtoH_v2(host, place, sizeof host));
    for (int at = 0; at < COUNT; at++)
        if (host[at] != value) {
            fprintf(stderr, "rank %d: %s: %g is %g at %d\n", rank, what, value, host[at], at);
            exit(1);
        }
}

static void fill(uint64_t place, float value)
{
    for (int at = 0; at < COUNT; at++)
        host[at] = value;
    CHECK(cuMemcpyHtoD_v2(place, host, sizeof host));
}

static const char *file(const char *name)
{
    static char path[4096];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    return path;
}

static id unique_id(void)
{
    id made;
    FILE *at;
    if (rank == 0) {
        char fresh[4096];
        CHECK(ncclGetUniqueId(&made));
        snprintf(fresh, sizeof fresh, "%s.new", file("id"));
        at = fopen(fresh, "w");
        fwrite(&made, sizeof made, 1, at);
        fclose(at);
        rename(fresh, file("id"));
        return made;
    }
    while (!(at = fopen(file("id"), "r")))
        usleep(1000);
    if (fread(&made, sizeof made, 1, at) != 1)
        exit(1);
    fclose(at);
    return made;
}

static void await(void *communicator)
{
    int state;
    do
        CHECK(ncclCommGetAsyncError(communicator, &state));
    while (state == IN_PROGRESS && !usleep(100));
    check(state, "the communicator");
}

// A call on communicators that do not block may be in progress when it returns, such as one that connects ranks.
static void queued(int result, const char *what)
{
    check(result == IN_PROGRESS ? 0 : result, what);
    if (result == IN_PROGRESS) {
        await(world);
        await(part);
    }
}
#define QUEUED(call) queued(call, #call)

static void make(const char *way)
{
    id of = unique_id();
    if (!strcmp(way, "nonblocking")) {
        config settings = {sizeof settings, 0xcafebeef, 21800, 0, {INT32_MIN, INT32_MIN, INT32_MIN}, NULL, INT32_MIN};
        int result = ncclCommInitRankConfig(&world, ranks, of, rank, &settings);
        check(result == IN_PROGRESS ? 0 : result, "ncclCommInitRankConfig");
        await(world);
        result = ncclCommSplit(world, rank / 2, rank, &part, NULL);
        check(result == IN_PROGRESS ? 0 : result, "ncclCommSplit");
        await(world);
        await(part);
    } else {
        CHECK(ncclCommInitRank(&world, ranks, of, rank));
        CHECK(ncclCommSplit(world, rank / 2, rank, &part, NULL));
    }
}

static float sum(int first_rank, int count, float round)
{
    float sum = 0;
    for (int at = first_rank; at < first_rank + count; at++)
        sum += (float)at + round;
    return sum;
}

static void reduce_parts(float round)
{
    CHECK(ncclGroupStart());
    CHECK(ncclAllReduce(from, other, COUNT, FLOAT, SUM, part, second));
    CHECK(ncclBroadcast(from, to, COUNT, FLOAT, 0, world, first));
    QUEUED(ncclGroupEnd());
    CHECK(cuStreamSynchronize(first));
    CHECK(cuStreamSynchronize(second));
    int start = rank / 2 * 2, count = ranks - start < 2 ? ranks - start : 2;
    expect(other, sum(start, count, round), "the part's sum");
    expect(to, round, "the broadcast");
}

static void pass_on(float round)
{
    CHECK(ncclGroupStart());
    CHECK(ncclSend(from, COUNT, FLOAT, (rank + 1) % ranks, world, first));
    CHECK(ncclRecv(to, COUNT, FLOAT, (rank + ranks - 1) % ranks, world, first));
    QUEUED(ncclGroupEnd());
    CHECK(cuStreamSynchronize(first));
    expect(to, (float)((rank + ranks - 1) % ranks) + round, "what was passed on");
}

static void capture(void)
{
    void *captured;
    CHECK(cuStreamBeginCapture_v2(first, 0));
    CHECK(ncclAllReduce(from, to, COUNT, FLOAT, SUM, world, first));
    CHECK(ncclAllReduce(from, other, COUNT, FLOAT, SUM, part, first));
    CHECK(cuStreamEndCapture(first, &captured));
    CHECK(cuGraphInstantiateWithFlags(&graph, captured, 0));
    CHECK(cuGraphDestroy(captured));
}

// A rank deregisters its windows when it likes: before a collective on other memory or after it.
static void use_windows(float round)
{
    enum { WINDOWS = 8 };
    void *windows[WINDOWS];
    for (int at = 0; at < WINDOWS; at++)
        CHECK(ncclCommWindowRegister(world, other, sizeof host, &windows[at], 0));
    for (int at = 0; rank % 2 && at < WINDOWS; at++)
        CHECK(ncclCommWindowDeregister(world, windows[at]));
    // Most cuts are asked for here.
    usleep(20000);
    CHECK(ncclAllReduce(from, to, COUNT, FLOAT, SUM, world, first));
    CHECK(cuStreamSynchronize(first));
    expect(to, sum(0, ranks, round), "the sum beside windows");
    for (int at = 0; rank % 2 == 0 && at < WINDOWS; at++)
        CHECK(ncclCommWindowDeregister(world, windows[at]));
}

static int has_to_stop(void)
{
    float stop = rank == 0 && !access(file("stop"), F_OK);
    CHECK(cuMemcpyHtoD_v2(flag, &stop, sizeof stop));
    QUEUED(ncclBroadcast(flag, flag, 1, FLOAT, 0, world, first));
    CHECK(cuStreamSynchronize(first));
    CHECK(cuMemcpyDtoH_v2(&stop, flag, sizeof stop));
    return stop != 0;
}

int main(int count, char **arguments)
{
    void *context;
    int device;
    if (count != 5)
        return 2;
    rank = atoi(arguments[1]);
    ranks = atoi(arguments[2]);
    directory = arguments[3];
    const char *way = arguments[4];
    CHECK(cuInit(0));
    CHECK(cuDeviceGet(&device, rank));
    CHECK(cuDevicePrimaryCtxRetain(&context, device));
    CHECK(cuCtxSetCurrent(context));
    uint64_t *buffers[] = {&from, &to, &other, &flag};
    for (int at = 0; at < 4; at++)
        CHECK(cuMemAlloc_v2(buffers[at], sizeof host));
    CHECK(cuStreamCreate(&first, 1));
    CHECK(cuStreamCreate(&second, 1));
    make(way);
    if (!strcmp(way, "graphs"))
        capture();
    puts("ready");
    fflush(stdout);
    srand((unsigned)rank);
    for (int round = 0; !has_to_stop(); round++) {
        usleep((useconds_t)(rand() % 2000));
        fill(from, (float)(rank + round % 1000));
        if (graph)
            CHECK(cuGraphLaunch(graph, first));
        else
            CHECK(ncclAllReduce(from, to, COUNT, FLOAT, SUM, world, first));
        CHECK(cuStreamSynchronize(first));
        expect(to, sum(0, ranks, (float)(round % 1000)), "the sum");
        if (!strcmp(way, "groups")) {
            reduce_parts((float)(round % 1000));
            pass_on((float)(round % 1000));
        }
        if (!strcmp(way, "windows"))
            use_windows((float)(round % 1000));
    }
    CHECK(ncclCommDestroy(part));
    CHECK(ncclCommDestroy(world));
    puts("done");
    return 0;
}
