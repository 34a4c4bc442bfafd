/* Device memory of every kind. Commands on standard input, one line each; answers "ok", or ends with what is wrong.
 *   fill SEED    writes a pattern to all of it
 *   check SEED   compares, and looks whether all addresses, ranges and attributes are as they were
 *   change N     writes another pattern to allocation N, and remembers it
 *   free N, alloc N BYTES
 *   share N      makes an IPC handle of allocation N
 *   special      memory of cuMemCreate with all that a region can have, at two addresses, for two devices
 *   host BYTES   memory of the host's NUMA node, which can be exported, for host and device
 *   touch        starts a thread that counts in memory of the host, without any call
 *   touched      waits until it has counted on
 *   graph BYTES  launches a graph that allocates, and does not free
 *   context      makes a context and destroys it
 *   profile, stop, detach  enable an activity of CUPTI, disable it, and detach CUPTI
 * Linked with the driver directly. */
#include <dlfcn.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef unsigned long long ptr;

int cuInit(unsigned);
int cuDeviceGetCount(int *);
int cuDevicePrimaryCtxRetain(void **, int);
int cuCtxSetCurrent(void *);
int cuCtxCreate_v2(void **, unsigned, int);
int cuCtxDestroy_v2(void *);
int cuMemAlloc_v2(ptr *, size_t);
int cuMemFree_v2(ptr);
int cuMemAllocAsync(ptr *, size_t, void *);
int cuStreamSynchronize(void *);
int cuMemcpyHtoD_v2(ptr, const void *, size_t);
int cuMemcpyDtoH_v2(void *, ptr, size_t);
int cuMemGetAddressRange_v2(ptr *, size_t *, ptr);
int cuMemGetInfo_v2(size_t *, size_t *);
int cuPointerGetAttribute(void *, int, ptr);
int cuMemAddressReserve(ptr *, size_t, size_t, ptr, unsigned long long);
int cuMemCreate(unsigned long long *, size_t, const void *, unsigned long long);
int cuMemMap(ptr, size_t, size_t, unsigned long long, unsigned long long);
int cuMemSetAccess(ptr, size_t, const void *, size_t);
int cuMemRelease(unsigned long long);
int cuIpcGetMemHandle(void *, ptr);
int cuGraphCreate(void **, unsigned);
int cuGraphAddMemAllocNode(void **, void *, const void *, size_t, void *);
int cuGraphInstantiateWithFlags(void **, void *, unsigned long long);
int cuGraphLaunch(void *, void *);

#define CHECK(call)                                                    \
    do {                                                               \
        int result_ = (call);                                          \
        if (result_ != 0) {                                            \
            printf("line %d: %s: %d\n", __LINE__, #call, result_);     \
            fflush(stdout);                                            \
            exit(1);                                                   \
        }                                                              \
    } while (0)
#define MOST 64

/* CUDA driver API reference, CUpointer_attribute: context, memory type, device pointer, buffer ID, device ordinal,
 * IPC capable, range start, range size, mapped, allowed handle types, pool. */
static const int attributes[] = {1, 2, 3, 7, 9, 10, 11, 12, 13, 14, 17};
#define ATTRIBUTES (sizeof attributes / sizeof *attributes)

static struct {
    ptr address;
    size_t bytes;
    uint32_t seed;
    int device;
    uint64_t known[ATTRIBUTES];
    int results[ATTRIBUTES];
    ptr start;
    size_t range;
    int range_result;
} all[MOST];
static int count;
static size_t free_before, total_before;

static void pattern(uint32_t *to, size_t bytes, uint32_t seed) {
    for (size_t i = 0; i < bytes / 4; i++) {
        to[i] = (uint32_t)i * 2654435761u + seed;
    }
}

static void look(int i, int is_first) {
    for (size_t a = 0; a < ATTRIBUTES; a++) {
        uint64_t value = 0;
        int result = cuPointerGetAttribute(&value, attributes[a], all[i].address);
        if (is_first) {
            all[i].known[a] = value, all[i].results[a] = result;
        } else if (value != all[i].known[a] || result != all[i].results[a]) {
            printf("allocation %d: attribute %d is %" PRIx64 " (%d), was %" PRIx64 " (%d)\n", i, attributes[a], value,
                   result, all[i].known[a], all[i].results[a]);
            fflush(stdout);
            exit(1);
        }
    }
    ptr start = 0;
    size_t range = 0;
    int result = cuMemGetAddressRange_v2(&start, &range, all[i].address + all[i].bytes / 2);
    if (is_first) {
        all[i].start = start, all[i].range = range, all[i].range_result = result;
    } else if (start != all[i].start || range != all[i].range || result != all[i].range_result) {
        printf("allocation %d: its range is %llx+%zx (%d)\n", i, start, range, result);
        fflush(stdout);
        exit(1);
    }
}

static int add(ptr address, size_t bytes) {
    int i = count++;
    all[i].address = address, all[i].bytes = bytes;
    look(i, 1);
    return i;
}

static void write_pattern(int i, uint32_t seed) {
    uint32_t *host = malloc(all[i].bytes);
    pattern(host, all[i].bytes, seed);
    CHECK(cuMemcpyHtoD_v2(all[i].address, host, all[i].bytes));
    free(host);
    all[i].seed = seed;
}

static void check(int i) {
    uint32_t *host = malloc(all[i].bytes), *wanted = malloc(all[i].bytes);
    pattern(wanted, all[i].bytes, all[i].seed);
    CHECK(cuMemcpyDtoH_v2(host, all[i].address, all[i].bytes));
    if (memcmp(host, wanted, all[i].bytes) != 0) {
        size_t at = 0;
        while (host[at] == wanted[at]) {
            at++;
        }
        printf("allocation %d of %zu bytes differs at word %zu\n", i, all[i].bytes, at);
        fflush(stdout);
        exit(1);
    }
    free(host), free(wanted);
}

struct properties { unsigned type, handles, place; int id; void *win32; unsigned char flags[8]; };
struct access { unsigned place; int id; unsigned flags; };

/* CUDA driver API reference, CUmemPoolProps and CUDA_MEM_ALLOC_NODE_PARAMS. */
struct allocation {
    struct { unsigned type, handles, place; int id; void *win32; size_t most; unsigned char reserved[56]; } pool;
    const void *access;
    size_t access_count, bytes;
    ptr address;
};

/* CUmemAllocationProp: can be exported by descriptor, compressible. */
static void special(void) {
    struct properties prop = {1, 1, 1, 0, NULL, {1}};
    struct access access[] = {{1, 0, 3}, {1, 1, 3}};
    unsigned long long handle = 0;
    CHECK(cuMemCreate(&handle, 4 << 20, &prop, 0));
    for (int i = 0; i < 2; i++) {
        ptr address = 0;
        CHECK(cuMemAddressReserve(&address, 4 << 20, 0, 0, 0));
        CHECK(cuMemMap(address, 4 << 20, 0, handle, 0));
        CHECK(cuMemSetAccess(address, 4 << 20, access, 2));
    }
}

/* For device 0 and the host. */
static ptr on_host(size_t bytes) {
    struct properties prop = {1, 1, 3, 0, NULL, {0}};
    struct access access[] = {{1, 0, 3}, {3, 0, 3}};
    unsigned long long handle = 0;
    ptr address = 0;
    CHECK(cuMemCreate(&handle, bytes, &prop, 0));
    CHECK(cuMemAddressReserve(&address, bytes, 0, 0, 0));
    CHECK(cuMemMap(address, bytes, 0, handle, 0));
    CHECK(cuMemSetAccess(address, bytes, access, 2));
    return address;
}

static volatile unsigned *counter;
static volatile unsigned counted;

static void *touch(void *unused) {
    for (;;) {
        counted++;
        *counter = counted;
        usleep(20);
        if (*counter != counted) {
            printf("%u where %u was written\n", *counter, counted);
            fflush(stdout);
            exit(1);
        }
    }
    return unused;
}

static void touched(void) {
    unsigned from = counted;
    while (counted < from + 3) {
        usleep(100);
    }
}

static void graph(size_t bytes) {
    void *graph = NULL, *node = NULL, *executable = NULL;
    struct allocation allocation = {{1, 0, 1, 0, NULL, 0, {0}}, NULL, 0, bytes, 0};
    CHECK(cuGraphCreate(&graph, 0));
    CHECK(cuGraphAddMemAllocNode(&node, graph, NULL, 0, &allocation));
    CHECK(cuGraphInstantiateWithFlags(&executable, graph, 0));
    CHECK(cuGraphLaunch(executable, NULL));
    CHECK(cuStreamSynchronize(NULL));
}

static ptr vmm(size_t bytes, int is_alias) {
    struct properties prop = {1, 0, 1, 0, NULL, {0}};
    struct access access = {1, 0, 3};
    ptr address = 0, other = 0;
    unsigned long long handle = 0;
    CHECK(cuMemAddressReserve(&address, bytes, 0, 0, 0));
    CHECK(cuMemCreate(&handle, bytes, &prop, 0));
    CHECK(cuMemMap(address, bytes, 0, handle, 0));
    CHECK(cuMemSetAccess(address, bytes, &access, 1));
    if (is_alias) {
        CHECK(cuMemAddressReserve(&other, bytes, 0, 0, 0));
        CHECK(cuMemMap(other, bytes, 0, handle, 0));
        CHECK(cuMemSetAccess(other, bytes, &access, 1));
        address = other;
    }
    CHECK(cuMemRelease(handle));
    return address;
}

/* Calls a function of CUPTI that takes a kind of activity, or nothing. */
static void cupti(const char *name) {
    enum { CONCURRENT_KERNEL = 10 };
    void *library = dlopen("libcupti.so.13", RTLD_NOW | RTLD_LOCAL);
    int (*function)(unsigned) = library ? (int (*)(unsigned))dlsym(library, name) : NULL;
    if (function == NULL) {
        printf("no %s: %s\n", name, dlerror());
        fflush(stdout);
        exit(1);
    }
    CHECK(function(CONCURRENT_KERNEL));
}

int main(void) {
    void *context;
    CHECK(cuInit(0));
    CHECK(cuDevicePrimaryCtxRetain(&context, 0));
    CHECK(cuCtxSetCurrent(context));
    static const size_t sizes[] = {4, 1000, 65536, 1 << 20, (2 << 20) - 4, 2 << 20, (2 << 20) + 4, 7 << 20};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        ptr address;
        CHECK(cuMemAlloc_v2(&address, sizes[i]));
        add(address, sizes[i]);
    }
    add(vmm(2 << 20, 0), 2 << 20);
    add(vmm(6 << 20, 1), 6 << 20);
    static const size_t pooled[] = {512, 3 << 20};
    for (size_t i = 0; i < sizeof pooled / sizeof *pooled; i++) {
        ptr address;
        CHECK(cuMemAllocAsync(&address, pooled[i], NULL));
        CHECK(cuStreamSynchronize(NULL));
        add(address, pooled[i]);
    }
    CHECK(cuMemGetInfo_v2(&free_before, &total_before));
    puts("ready");
    fflush(stdout);
    char line[128];
    while (fgets(line, sizeof line, stdin)) {
        unsigned number = 0;
        size_t bytes = 0;
        if (sscanf(line, "fill %u", &number) == 1) {
            for (int i = 0; i < count; i++) {
                write_pattern(i, number + (unsigned)i);
            }
        } else if (strncmp(line, "check", 5) == 0) {
            for (int i = 0; i < count; i++) {
                look(i, 0);
                check(i);
            }
            size_t free_now, total_now;
            CHECK(cuMemGetInfo_v2(&free_now, &total_now));
            if (free_now != free_before || total_now != total_before) {
                printf("free memory is %zu of %zu, was %zu\n", free_now, total_now, free_before);
                fflush(stdout);
                return 1;
            }
        } else if (sscanf(line, "change %u", &number) == 1) {
            write_pattern((int)number, all[number].seed + 77);
        } else if (sscanf(line, "alloc %zu", &bytes) == 1) {
            ptr address;
            CHECK(cuMemAlloc_v2(&address, bytes));
            write_pattern(add(address, bytes), 5);
            CHECK(cuMemGetInfo_v2(&free_before, &total_before));
        } else if (sscanf(line, "share %u", &number) == 1) {
            unsigned char handle[64];
            CHECK(cuIpcGetMemHandle(handle, all[number].address));
        } else if (strncmp(line, "context", 7) == 0) {
            void *other;
            CHECK(cuCtxCreate_v2(&other, 0, 0));
            CHECK(cuCtxDestroy_v2(other));
        } else if (strncmp(line, "profile", 7) == 0) {
            cupti("cuptiActivityEnable");
        } else if (strncmp(line, "stop", 4) == 0) {
            cupti("cuptiActivityDisable");
        } else if (strncmp(line, "detach", 6) == 0) {
            cupti("cuptiFinalize");
        } else if (sscanf(line, "host %zu", &bytes) == 1) {
            write_pattern(add(on_host(bytes), bytes), 6);
        } else if (strncmp(line, "touched", 7) == 0) {
            touched();
        } else if (strncmp(line, "touch", 5) == 0) {
            pthread_t thread;
            counter = (volatile unsigned *)(uintptr_t)on_host(2 << 20);
            CHECK(pthread_create(&thread, NULL, touch, NULL));
        } else if (strncmp(line, "special", 7) == 0) {
            special();
            CHECK(cuMemGetInfo_v2(&free_before, &total_before));
        } else if (sscanf(line, "graph %zu", &bytes) == 1) {
            graph(bytes);
            CHECK(cuMemGetInfo_v2(&free_before, &total_before));
        } else if (sscanf(line, "free %u", &number) == 1) {
            size_t before;
            CHECK(cuMemGetInfo_v2(&before, &total_before));
            CHECK(cuMemFree_v2(all[number].address));
            all[number] = all[--count];
            /* A process that the launcher is just starting has its descriptors until it executes its program. */
            for (int i = 0; i < 300; i++) {
                CHECK(cuMemGetInfo_v2(&free_before, &total_before));
                if (free_before > before) {
                    break;
                }
                usleep(1000);
            }
        } else {
            return 2;
        }
        puts("ok");
        fflush(stdout);
    }
    return 0;
}
