// What a program can see of device memory. It prints nothing that may differ between two drivers, so that its output is the
// same with and without something in front of the driver; what must hold in any case it checks itself.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

typedef unsigned long long Address;
typedef void *Handle;

int cuInit(unsigned);
int cuDevicePrimaryCtxRetain(Handle *, int);
int cuCtxCreate_v2(Handle *, unsigned, int);
int cuCtxSetCurrent(Handle);
int cuCtxGetCurrent(Handle *);
int cuCtxSynchronize(void);
int cuCtxEnablePeerAccess(Handle, unsigned);
int cuCtxDisablePeerAccess(Handle);
int cuMemAlloc_v2(Address *, size_t);
int cuMemAllocPitch_v2(Address *, size_t *, size_t, size_t, unsigned);
int cuMemFree_v2(Address);
int cuMemGetInfo_v2(size_t *, size_t *);
int cuMemGetAddressRange_v2(Address *, size_t *, Address);
int cuPointerGetAttribute(void *, unsigned, Address);
int cuPointerGetAttributes(unsigned, unsigned *, void **, Address);
int cuPointerSetAttribute(const void *, unsigned, Address);
int cuMemsetD8_v2(Address, unsigned char, size_t);
int cuMemcpyDtoH_v2(void *, Address, size_t);
int cuStreamCreate(Handle *, unsigned);
int cuStreamSynchronize(Handle);
int cuStreamBeginCapture_v2(Handle, unsigned);
int cuStreamEndCapture(Handle, Handle *);
int cuThreadExchangeStreamCaptureMode(unsigned *);
int cuLaunchHostFunc(Handle, void (*)(void *), void *);

#define MIB ((size_t)1 << 20)

#define CHECK(condition)                                                                  \
    do {                                                                                  \
        if (!(condition)) {                                                               \
            printf("line %d: not so: %s\n", __LINE__, #condition);                        \
            exit(1);                                                                      \
        }                                                                                 \
    } while (0)
#define OK(call)                                                                          \
    do {                                                                                  \
        int code_ = (call);                                                               \
        if (code_) {                                                                      \
            printf("line %d: %s gives %d\n", __LINE__, #call, code_);                     \
            exit(1);                                                                      \
        }                                                                                 \
    } while (0)

static Handle start(int device)
{
    Handle context;
    OK(cuInit(0));
    OK(cuDevicePrimaryCtxRetain(&context, device));
    OK(cuCtxSetCurrent(context));
    return context;
}

static size_t free_bytes(void)
{
    size_t free, total;
    OK(cuMemGetInfo_v2(&free, &total));
    CHECK(free <= total);
    return free;
}

static uint64_t next(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state >> 33;
}

// As many small ones as large ones on the scale of powers of two; a few of several MiB.
static size_t some_size(uint64_t *state)
{
    if (next(state) % 200 == 0)
        return MIB + next(state) % (8 * MIB);
    return 1 + next(state) % ((uint64_t)1 << next(state) % 20);
}

// ---- many ----

typedef struct {
    Address address;
    size_t bytes;
    unsigned char value;
} Live;

static int by_address(const void *left, const void *right)
{
    Address a = ((const Live *)left)->address, b = ((const Live *)right)->address;
    return (a > b) - (a < b);
}

static void check_apart(Live *live, size_t count)
{
    Live *sorted = malloc(count * sizeof *sorted);
    memcpy(sorted, live, count * sizeof *sorted);
    qsort(sorted, count, sizeof *sorted, by_address);
    for (size_t i = 0; i < count; i++) {
        CHECK(sorted[i].address % 512 == 0);
        CHECK(i + 1 == count || sorted[i].address + sorted[i].bytes <= sorted[i + 1].address);
    }
    free(sorted);
}

// Its first and last bytes, of one in 16: copies take longer than everything else here.
static void check_content(Live one)
{
    unsigned char byte = 0;
    if (one.value % 16)
        return;
    for (int end = 0; end < 2; end++) {
        OK(cuMemcpyDtoH_v2(&byte, one.address + (end ? one.bytes - 1 : 0), 1));
        CHECK(byte == one.value);
    }
}

static Live allocate(uint64_t *state)
{
    Live one = { 0, some_size(state), (unsigned char)next(state) };
    OK(cuMemAlloc_v2(&one.address, one.bytes));
    if (one.value % 16 == 0) {
        OK(cuMemsetD8_v2(one.address, one.value, 1));
        OK(cuMemsetD8_v2(one.address + one.bytes - 1, one.value, 1));
    }
    return one;
}

static void many(size_t count)
{
    uint64_t state = 1;
    size_t before, used, live_count = 0;
    Live *live = malloc(count * sizeof *live);
    start(0);
    before = free_bytes();
    while (live_count < count) {
        if (live_count && next(&state) % 4 == 0) {
            size_t which = next(&state) % live_count;
            check_content(live[which]);
            OK(cuMemFree_v2(live[which].address));
            live[which] = live[--live_count];
        } else {
            live[live_count++] = allocate(&state);
        }
    }
    check_apart(live, live_count);
    used = before - free_bytes();
    while (live_count) {
        size_t which = next(&state) % live_count;
        check_content(live[which]);
        OK(cuMemFree_v2(live[which].address));
        live[which] = live[--live_count];
    }
    CHECK(free_bytes() == before);
    // The only line that is not compared as it is.
    fprintf(stderr, "%zu\n", used);
}

// ---- threads ----

static void *thread(void *context)
{
    uint64_t state = (uint64_t)pthread_self();
    Live live[100];
    size_t count = 0;
    OK(cuCtxSetCurrent(context));
    for (int i = 0; i < 2000; i++) {
        if (count && (count == 100 || next(&state) % 2)) {
            check_content(live[--count]);
            OK(cuMemFree_v2(live[count].address));
        } else {
            live[count++] = allocate(&state);
        }
    }
    while (count)
        OK(cuMemFree_v2(live[--count].address));
    return NULL;
}

static void threads(void)
{
    pthread_t all[8];
    Handle context = start(0);
    size_t before = free_bytes();
    for (int i = 0; i < 8; i++)
        CHECK(!pthread_create(&all[i], NULL, thread, context));
    for (int i = 0; i < 8; i++)
        pthread_join(all[i], NULL);
    CHECK(free_bytes() == before);
    printf("done\n");
}

// ---- attributes ----

enum {
    CONTEXT = 1, DEVICE_POINTER = 3, HOST_POINTER = 4, P2P_TOKENS = 5, SYNC_MEMOPS = 6, BUFFER_ID = 7,
    RANGE_START = 11, ACCESS_FLAGS = 16, MAPPING_BASE = 19, MEMORY_BLOCK_ID = 20, LAST = 22
};

static Handle current(void)
{
    Handle context;
    OK(cuCtxGetCurrent(&context));
    return context;
}

// Addresses relative to what was asked for; identities only as being there.
static long long shown(unsigned attribute, uint64_t value, Address address)
{
    switch (attribute) {
    case CONTEXT: return value ? (Handle)value == current() ? 1 : 2 : 0;
    case DEVICE_POINTER: case RANGE_START: case MAPPING_BASE: return value ? (long long)(address - value) : -1;
    case BUFFER_ID: case MEMORY_BLOCK_ID: return value != 0;
    default: return (long long)value;
    }
}

static void print_attributes(const char *name, Address address)
{
    unsigned attributes[LAST];
    uint64_t values[LAST];
    void *places[LAST];
    Address base = 0;
    size_t bytes = 0;
    int code = cuMemGetAddressRange_v2(&base, &bytes, address), count = 0;
    printf("%s: range %d %lld %zu;", name, code, code ? 0 : (long long)(address - base), bytes);
    printf(" only size %d;", cuMemGetAddressRange_v2(NULL, &bytes, address));
    for (unsigned attribute = 0; attribute <= LAST; attribute++) {
        uint64_t value = 0;
        code = cuPointerGetAttribute(&value, attribute, address);
        printf(" %u: %d %lld", attribute, code, code ? 0 : shown(attribute, value, address));
        if (attribute && attribute != 21 && attribute != 22 && attribute != P2P_TOKENS) {
            attributes[count] = attribute;
            values[count] = 0;
            places[count] = &values[count];
            count++;
        }
    }
    code = cuPointerGetAttributes(count, attributes, places, address);
    printf("; together %d:", code);
    for (int i = 0; i < count; i++)
        printf(" %lld", shown(attributes[i], values[i], address));
    printf("\n");
}

static uint64_t id_of(Address address)
{
    uint64_t id = 0, again = 0;
    OK(cuPointerGetAttribute(&id, BUFFER_ID, address));
    OK(cuPointerGetAttribute(&again, BUFFER_ID, address + 1));
    CHECK(id == again);
    return id;
}

static void attributes(void)
{
    Address small, second, large, odd;
    Handle other;
    unsigned on = 1, is_set = 0;
    uint64_t id;
    start(0);
    OK(cuMemAlloc_v2(&small, 1000));
    OK(cuMemAlloc_v2(&second, 1000));
    OK(cuMemAlloc_v2(&large, 4 * MIB));
    OK(cuMemAlloc_v2(&odd, 2 * MIB + 1));
    print_attributes("small", small);
    print_attributes("inside", small + 999);
    print_attributes("behind", small + 1000);
    print_attributes("large", large);
    print_attributes("end", large + 4 * MIB - 1);
    print_attributes("odd", odd + 2 * MIB);
    print_attributes("behind odd", odd + 2 * MIB + 1);
    print_attributes("nothing", 0x7000);
    CHECK(id_of(small) != id_of(second) && id_of(large) != id_of(odd) && id_of(small) != id_of(large));
    printf("set %d", cuPointerSetAttribute(&on, SYNC_MEMOPS, small + 8));
    OK(cuPointerGetAttribute(&is_set, SYNC_MEMOPS, small));
    printf(" %u", is_set);
    OK(cuPointerGetAttribute(&is_set, SYNC_MEMOPS, second));
    printf(" %u", is_set);
    on = 0;
    printf(" %d", cuPointerSetAttribute(&on, SYNC_MEMOPS, small));
    OK(cuPointerGetAttribute(&is_set, SYNC_MEMOPS, small));
    printf(" %u, wrong %d %d %d\n", is_set, cuPointerSetAttribute(&on, CONTEXT, small),
           cuPointerSetAttribute(&on, SYNC_MEMOPS, 0x7000), cuPointerSetAttribute(NULL, SYNC_MEMOPS, small));
    // Asked from another context.
    OK(cuCtxCreate_v2(&other, 0, 0));
    print_attributes("from another context", small);
    id = id_of(small);
    OK(cuMemFree_v2(small));
    print_attributes("freed", small);
    print_attributes("its neighbour", second);
    OK(cuMemAlloc_v2(&small, 1000));
    CHECK(id_of(small) != id);
    print_attributes("of another context", small);
    OK(cuMemFree_v2(large));
    print_attributes("freed large", large);
    printf("null %d\n", cuPointerGetAttribute(NULL, RANGE_START, small));
    OK(cuCtxSetCurrent(NULL));
    printf("without a context %d\n", cuMemGetAddressRange_v2(NULL, NULL, small));
}

// ---- errors, pitch ----

static void errors(void)
{
    Address address = 0, freed;
    size_t pitch = 0;
    printf("before: %d %d\n", cuMemAlloc_v2(&address, 64), cuMemFree_v2(0));
    OK(cuInit(0));
    printf("no context: %d %d %d", cuMemAlloc_v2(&address, 64), cuMemAlloc_v2(&address, 8 * MIB), cuMemFree_v2(0));
    printf(" %d\n", cuMemAllocPitch_v2(&address, &pitch, 64, 2, 4));
    start(0);
    printf("wrong: %d %d %d", cuMemAlloc_v2(NULL, 64), cuMemAlloc_v2(&address, 0), cuMemAlloc_v2(NULL, 0));
    printf(" %d %d", cuMemAlloc_v2(&address, SIZE_MAX), cuMemAlloc_v2(&address, SIZE_MAX / 2));
    printf(" %d\n", cuMemFree_v2(0x7000));
    for (size_t width = 1; width < 10000; width += 97) {
        for (unsigned element = 3; element < 17; element++) {
            int code = cuMemAllocPitch_v2(&address, &pitch, width, 700, element);
            if (code)
                continue;
            printf("%zu ", pitch);
            OK(cuMemsetD8_v2(address + pitch * 700 - 1, 1, 1));
            OK(cuMemFree_v2(address));
        }
    }
    printf("pitch: %d", cuMemAllocPitch_v2(&address, &pitch, 64, 0, 4));
    printf(" %d", cuMemAllocPitch_v2(&address, NULL, 64, 1, 4));
    printf(" %d", cuMemAllocPitch_v2(&address, &pitch, SIZE_MAX, 1, 4));
    printf(" %d\n", cuMemAllocPitch_v2(&address, &pitch, 64, SIZE_MAX / 8, 4));
    for (size_t bytes = 1000; bytes < 9 * MIB; bytes *= 9) {
        OK(cuMemAlloc_v2(&freed, bytes));
        printf("inside %d", cuMemFree_v2(freed + 512));
        OK(cuMemFree_v2(freed));
        printf(", again %d\n", cuMemFree_v2(freed));
    }
    OK(cuMemAlloc_v2(&address, 64));
    OK(cuMemAlloc_v2(&freed, 4 * MIB));
    OK(cuCtxSetCurrent(NULL));
    printf("no context: %d %d\n", cuMemFree_v2(address), cuMemFree_v2(freed));
}

// ---- full ----

// Until nothing is left, by large ones and then by small ones; twice the same.
static void full(void)
{
    size_t free;
    Address address, first, *all = malloc(100000 * sizeof *all);
    start(0);
    free = free_bytes();
    // What lies idle after a free is there for a large one.
    OK(cuMemAlloc_v2(&address, 64));
    OK(cuMemFree_v2(address));
    CHECK(free_bytes() == free);
    OK(cuMemAlloc_v2(&address, free));
    printf("%d", cuMemAlloc_v2(&first, 64));
    printf(" %d\n", cuMemAlloc_v2(&first, 2 * MIB));
    OK(cuMemFree_v2(address));
    for (int turn = 0; turn < 2; turn++) {
        int count = 0, large;
        while (count < 100000 && !cuMemAlloc_v2(&all[count], 6 * MIB))
            count++;
        large = count;
        while (count < 100000 && !cuMemAlloc_v2(&all[count], 64 << 10))
            count++;
        printf("%d and %d, free %zu\n", large, count - large, free_bytes());
        while (count)
            OK(cuMemFree_v2(all[--count]));
        CHECK(free_bytes() == free);
    }
    int count = 0;
    while (count < 100000 && !cuMemAlloc_v2(&all[count], 128 << 10))
        count++;
    printf("%d, free %zu\n", count, free_bytes());
    while (count)
        OK(cuMemFree_v2(all[--count]));
    CHECK(free_bytes() == free);
}

// ---- waits ----

static volatile int may_end, is_done;

// Ends a while after it may, so that it does not matter how long the calls take that must not wait for it. It
// ends at last in any case: a call that waits for it all the same is told by `is_done`.
static void late(void *unused)
{
    (void)unused;
    for (int turn = 0; turn < 20000 && !may_end; turn++)
        usleep(1000);
    usleep(100000);
    is_done = 1;
}

static void launch_late(Handle stream)
{
    may_end = is_done = 0;
    OK(cuLaunchHostFunc(stream, late, NULL));
}

static void waits(void)
{
    Address address, other_address;
    Handle context = start(0), other, stream;
    OK(cuStreamCreate(&stream, 1));
    for (size_t bytes = 64; bytes < 10 * MIB; bytes *= 100000) {
        OK(cuMemAlloc_v2(&address, bytes));
        launch_late(stream);
        OK(cuMemAlloc_v2(&other_address, bytes));
        printf("after an allocation %d", is_done);
        may_end = 1;
        OK(cuMemFree_v2(address));
        printf(", after a free %d", is_done);
        launch_late(stream);
        // The context that it was allocated in is what counts, not the current one.
        OK(cuCtxCreate_v2(&other, 0, 0));
        OK(cuMemAlloc_v2(&address, bytes));
        OK(cuMemFree_v2(address));
        printf(", of another context's %d", is_done);
        may_end = 1;
        OK(cuMemFree_v2(other_address));
        printf(", from another context %d\n", is_done);
        OK(cuCtxSetCurrent(context));
    }
}

// ---- captures ----

static void captures(void)
{
    Handle stream, graph;
    Address before[2], address;
    start(0);
    OK(cuStreamCreate(&stream, 1));
    for (unsigned mode = 0; mode < 3; mode++) {
        for (unsigned thread = 0; thread < 3; thread++) {
            unsigned exchanged = thread;
            OK(cuMemAlloc_v2(&before[0], 64));
            OK(cuMemAlloc_v2(&before[1], 4 * MIB));
            for (int what = 0; what < 4; what++) {
                OK(cuStreamBeginCapture_v2(stream, mode));
                OK(cuThreadExchangeStreamCaptureMode(&exchanged));
                int code = what < 2 ? cuMemAlloc_v2(&address, what ? 4 * MIB : 64) : cuMemFree_v2(before[what - 2]);
                OK(cuThreadExchangeStreamCaptureMode(&exchanged));
                printf("mode %u, thread's %u: %d, ends %d\n", mode, thread, code, cuStreamEndCapture(stream, &graph));
                CHECK(exchanged == thread);
            }
        }
    }
}

// ---- peers ----

static int access_flags(Address address)
{
    unsigned flags = 77;
    OK(cuPointerGetAttribute(&flags, ACCESS_FLAGS, address));
    return (int)flags;
}

static void peers(void)
{
    Address all[6];
    Handle first = start(0), second = start(1), third;
    for (int step = 0; step < 6; step++) {
        OK(cuCtxSetCurrent(first));
        // The last two after access was enabled.
        if (step < 3) {
            OK(cuMemAlloc_v2(&all[2 * step], 64));
            OK(cuMemAlloc_v2(&all[2 * step + 1], 4 * MIB));
        }
        OK(cuCtxSetCurrent(second));
        int code = 0;
        if (step == 1)
            code = cuCtxEnablePeerAccess(first, 0);
        if (step == 3) {
            // Another context of the same device.
            OK(cuCtxCreate_v2(&third, 0, 1));
            code = cuCtxEnablePeerAccess(first, 0);
            OK(cuCtxSetCurrent(second));
        }
        if (step == 4)
            code = cuCtxDisablePeerAccess(first);
        if (step == 5) {
            OK(cuCtxSetCurrent(third));
            code = cuCtxDisablePeerAccess(first);
        }
        printf("step %d: %d;", step, code);
        for (int i = 0; i < 6 && i < 2 * step + 2; i++) {
            int theirs = access_flags(all[i]);
            OK(cuCtxSetCurrent(first));
            printf(" %d/%d", theirs, access_flags(all[i]));
            OK(cuCtxSetCurrent(second));
        }
        printf("\n");
    }
}

// ---- child ----

static void child(void)
{
    Address address;
    size_t free, total;
    unsigned kind = 0;
    int status;
    start(0);
    OK(cuMemAlloc_v2(&address, 64));
    fflush(stdout);
    pid_t pid = fork();
    if (!pid) {
        Address other;
        printf("child: %d %d", cuMemAlloc_v2(&other, 64), cuMemGetInfo_v2(&free, &total));
        printf(" %d %d\n", cuPointerGetAttribute(&kind, 2, address), cuMemFree_v2(address));
        fflush(stdout);
        _exit(0);
    }
    waitpid(pid, &status, 0);
    OK(cuMemFree_v2(address));
    printf("parent: %d\n", status);
}

// ---- a driver that fails ----

static void troubled(void)
{
    Address all[6];
    size_t before;
    start(0);
    before = free_bytes();
    for (int turn = 0; turn < 4; turn++) {
        for (int i = 0; i < 6; i++) {
            OK(cuMemAlloc_v2(&all[i], i % 2 ? 3 * MIB : 1000));
            OK(cuMemsetD8_v2(all[i], 1, 1000));
        }
        for (int i = 0; i < 6; i++)
            OK(cuMemFree_v2(all[i]));
    }
    CHECK(free_bytes() == before);
    printf("all is well\n");
}

int main(int count, char **arguments)
{
    const char *what = count > 1 ? arguments[1] : "";
    if (!strcmp(what, "many")) many(strtoul(arguments[2], NULL, 10));
    else if (!strcmp(what, "threads")) threads();
    else if (!strcmp(what, "attributes")) attributes();
    else if (!strcmp(what, "errors")) errors();
    else if (!strcmp(what, "full")) full();
    else if (!strcmp(what, "waits")) waits();
    else if (!strcmp(what, "captures")) captures();
    else if (!strcmp(what, "peers")) peers();
    else if (!strcmp(what, "child")) child();
    else if (!strcmp(what, "troubled")) troubled();
    else return 2;
    return 0;
}
