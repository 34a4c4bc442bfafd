/* Two processes that have each other's host memory by descriptors (cuMemCreate with a NUMA node), as NCCL's ranks with
 * NCCL_CUMEM_HOST_ENABLE=1. In each step both write to the memory of the other one, with the CPU and with a kernel. A thread
 * of each counts in that memory all the time, without any call. The output has a hash of all that was written. */
#include "vmm.h"

#include <pthread.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>

enum { COUNT = 4096, COUNTER_AT = COUNT, DESCRIPTOR = 1, HOST_NODE = 3 };

CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle, int type,
                                      unsigned long long flags);
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shareable, int type);

static const struct location node = {.type = HOST_NODE};

struct rank {
    struct job job;
    unsigned number;
    int other;
    size_t bytes;
    uint32_t *mine, *theirs;
};

static void put(const struct rank *rank, const void *data, size_t bytes) {
    if (write(rank->other, data, bytes) != (ssize_t)bytes) {
        fprintf(stderr, "the other process has gone\n");
        exit(1);
    }
}

static void get(const struct rank *rank, void *data, size_t bytes) {
    if (read(rank->other, data, bytes) != (ssize_t)bytes) {
        fprintf(stderr, "the other process has gone\n");
        exit(1);
    }
}

static void meet(const struct rank *rank) {
    char byte = 0;
    put(rank, &byte, 1);
    get(rank, &byte, 1);
}

static uint32_t *map(const struct rank *rank, CUmemGenericAllocationHandle handle) {
    struct access access[] = {{.location = {.type = 1}, .flags = 3}, {.location = node, .flags = 3}};
    CUdeviceptr address;
    CHECK(cuMemAddressReserve(&address, rank->bytes, 0, 0, 0));
    CHECK(cuMemMap(address, rank->bytes, 0, handle, 0));
    CHECK(cuMemSetAccess(address, rank->bytes, access, 2));
    return (uint32_t *)(uintptr_t)address;
}

static void share(struct rank *rank) {
    struct allocation_prop prop = {.type = 1, .handle_types = DESCRIPTOR, .location = node};
    CUmemGenericAllocationHandle own, imported;
    int message[2] = {getpid()};
    CHECK(cuMemGetAllocationGranularity(&rank->bytes, &prop, 0));
    CHECK(cuMemCreate(&own, rank->bytes, &prop, 0));
    rank->mine = map(rank, own);
    for (unsigned i = 0; i < COUNT; i++) {
        rank->mine[i] = i * 7 + rank->number;
    }
    CHECK(cuMemExportToShareableHandle(&message[1], own, DESCRIPTOR, 0));
    put(rank, message, sizeof message);
    int own_descriptor = message[1];
    get(rank, message, sizeof message);
    int process = (int)syscall(SYS_pidfd_open, message[0], 0);
    SYSTEM(process);
    int descriptor = (int)syscall(SYS_pidfd_getfd, process, message[1], 0);
    SYSTEM(descriptor);
    CHECK(cuMemImportFromShareableHandle(&imported, (void *)(uintptr_t)descriptor, DESCRIPTOR));
    rank->theirs = map(rank, imported);
    SYSTEM(close(descriptor));
    SYSTEM(close(process));
    meet(rank);
    SYSTEM(close(own_descriptor));
    if (rank->number == 1) {
        /* The mappings are left. */
        CHECK(cuMemRelease(own));
        CHECK(cuMemRelease(imported));
    }
}

static void *count(void *argument) {
    const struct rank *rank = argument;
    volatile uint32_t *counter = rank->theirs + COUNTER_AT;
    for (uint32_t counted = 1;; counted++) {
        *counter = counted;
        usleep(50);
        if (*counter != counted) {
            fprintf(stderr, "process %u: %u where %u was written\n", rank->number, *counter, counted);
            exit(1);
        }
    }
    return NULL;
}

/* Writes to the memory of the other process. */
static void write_step(const struct rank *rank, unsigned step) {
    for (unsigned i = 0; i < COUNT / 2; i++) {
        rank->theirs[i] = rank->theirs[i] * 31 + step + i + rank->number;
    }
    job_mix(&rank->job, (uintptr_t)(rank->theirs + COUNT / 2), COUNT / 2, step + rank->number, NULL);
    CHECK(cuCtxSynchronize());
}

/* A hash of the memory of this one, which host and device see alike. */
static uint64_t hash_of(const struct rank *rank) {
    static uint32_t words[COUNT];
    CHECK(cuMemcpyDtoH_v2(words, (uintptr_t)rank->mine, sizeof words));
    if (memcmp(words, rank->mine, sizeof words) != 0) {
        fprintf(stderr, "process %u: host and device differ\n", rank->number);
        exit(1);
    }
    return job_hash(rank->number, words, COUNT);
}

int main(int argc, char **argv) {
    int pair[2];
    SYSTEM(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair));
    pid_t child = fork();
    SYSTEM(child);
    struct rank rank = {.number = child == 0, .other = pair[child == 0]};
    close(pair[child != 0]);
    rank.job = job_start(argc, argv);
    share(&rank);
    pthread_t thread;
    if (pthread_create(&thread, NULL, count, &rank) != 0) {
        fprintf(stderr, "no thread\n");
        return 1;
    }
    for (unsigned step = 1; step <= rank.job.steps; step++) {
        write_step(&rank, step);
        meet(&rank);
        uint64_t sum = hash_of(&rank), theirs;
        put(&rank, &sum, sizeof sum);
        get(&rank, &theirs, sizeof theirs);
        if (rank.number == 0) {
            job_line(step, sum * 31 + theirs);
        }
    }
    fflush(stdout);
    meet(&rank);
    if (rank.number == 0) {
        waitpid(child, NULL, 0);
    }
    _exit(0);
}
