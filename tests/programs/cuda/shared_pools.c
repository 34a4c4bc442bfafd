/* Two processes, each with a pool that the other one has imported. In each step each process allocates from its own pool
 * and sends the data of the allocation. A step later the other one imports that, writes to it with a kernel and frees it.
 * Pools are exported again and again, by SCM_RIGHTS; each descriptor waits for some steps until it is imported. So at each
 * moment there are allocations and pools that are exported and not imported yet. The output has a hash of all that was
 * read in each step. With the file `lax` in the working directory, the program also does what CUDA does not define: it
 * imports allocations twice, and frees some of them only after their owner has. */
#include "shared_pools.h"

#include <sys/wait.h>

enum { COUNT = 128, BYTES = COUNT * 4, EXPORT_EACH = 5, LAG = 3, HANDLE_TYPES = 10, FIRST_WITH_HANDLE_TYPES = 13020 };

/* A step's allocation, and a pool's descriptor beside it if there is one. */
struct message {
    unsigned step;
    struct export_data data;
};

struct rank {
    struct job job;
    unsigned number;
    int other;
    CUstream stream;
    CUmemoryPool pool, theirs;
    /* Not imported yet; its step. */
    int descriptor;
    unsigned since;
    /* Of this process, and of the other one, from the step before. */
    CUdeviceptr own;
    struct message message;
    /* What the owner frees first. */
    CUdeviceptr late;
    uint64_t sum;
};

static int exported(const struct rank *rank) {
    int descriptor;
    CHECK(cuMemPoolExportToShareableHandle(&descriptor, rank->pool, DESCRIPTOR, 0));
    return descriptor;
}

/* The pool that is there may still have an allocation. */
static void import_pool(struct rank *rank) {
    CUmemoryPool pool;
    CUdeviceptr address;
    CHECK(cuMemPoolImportFromShareableHandle(&pool, (void *)(uintptr_t)rank->descriptor, DESCRIPTOR, 0));
    if (cuMemAllocFromPoolAsync(&address, BYTES, pool, rank->stream) == 0) {
        fail("an imported pool has allocated");
    }
    if (rank->theirs != NULL) {
        CHECK(cuMemPoolDestroy(rank->theirs));
    }
    rank->theirs = pool;
    SYSTEM(close(rank->descriptor));
    rank->descriptor = -1;
}

static void read_words(struct rank *rank, CUdeviceptr address) {
    uint32_t words[COUNT];
    CHECK(cuStreamSynchronize(rank->stream));
    CHECK(cuMemcpyDtoH_v2(words, address, BYTES));
    rank->sum = job_hash(rank->sum, words, COUNT);
}

/* What it was created with, where the driver says that. */
static void check_handle_types(CUmemoryPool pool) {
    int version, types;
    CHECK(cuDriverGetVersion(&version));
    if (version < FIRST_WITH_HANDLE_TYPES) {
        return;
    }
    CHECK(cuMemPoolGetAttribute(pool, HANDLE_TYPES, &types));
    if (types != DESCRIPTOR) {
        fail("the pool has other handle types");
    }
}

/* Writes to what the other process has allocated in the step before, which it frees in this one. */
static void use_theirs(struct rank *rank, unsigned step) {
    CUdeviceptr address, again;
    int is_lax = job_has_file("lax");
    CHECK(cuMemPoolImportPointer(&address, rank->theirs, &rank->message.data));
    if (is_lax) {
        CHECK(cuMemPoolImportPointer(&again, rank->theirs, &rank->message.data));
        CHECK(cuMemFreeAsync(again, rank->stream));
    }
    read_words(rank, address);
    job_mix(&rank->job, address, COUNT, rank->message.step, rank->stream);
    read_words(rank, address);
    switch (step % 3) {
    case 0:
        CHECK(cuMemFreeAsync(address, rank->stream));
        CHECK(cuStreamSynchronize(rank->stream));
        break;
    case 1:
        CHECK(cuMemFree_v2(address));
        break;
    case 2:
        if (is_lax) {
            rank->late = address;
            break;
        }
        /* The free has happened before the owner is told. */
        CHECK(cuMemFreeAsync(address, NULL));
        CHECK(cuStreamSynchronize(NULL));
        break;
    }
}

/* Reads what the other process has written, writes to it once more, and gives it up. */
static void use_own(struct rank *rank, unsigned step) {
    read_words(rank, rank->own);
    job_mix(&rank->job, rank->own, COUNT, step * 7, rank->stream);
    read_words(rank, rank->own);
    CHECK(cuMemFreeAsync(rank->own, rank->stream));
    CHECK(cuStreamSynchronize(rank->stream));
    CHECK(cuMemPoolTrimTo(rank->pool, 0));
}

static void one_step(struct rank *rank, unsigned step) {
    struct message message = {.step = step};
    CUdeviceptr own;
    /* Sometimes a segment of its own. */
    size_t bytes = step % 4 == 0 ? 3 << 20 : BYTES * (1 + step % 3);
    int descriptor = step % EXPORT_EACH == 1 ? exported(rank) : -1;
    CHECK(cuMemAllocFromPoolAsync(&own, bytes, rank->pool, rank->stream));
    CHECK(cuMemPoolExportPointer(&message.data, own));
    CHECK(cuMemsetD32Async(own, step * 1000 + rank->number, COUNT, rank->stream));
    CHECK(cuStreamSynchronize(rank->stream));
    send_message(rank->other, &message, sizeof message, descriptor);
    if (descriptor >= 0) {
        SYSTEM(close(descriptor));
    }
    struct message theirs;
    int got = receive_message(rank->other, &theirs, sizeof theirs);
    if (theirs.step != step || (got >= 0) != (descriptor >= 0)) {
        fail("a message of another step");
    }
    if (got >= 0) {
        rank->descriptor = got;
        rank->since = step;
    }
    if (rank->descriptor >= 0 && (step == 1 || step == rank->since + LAG)) {
        import_pool(rank);
    }
    if (step > 1) {
        use_theirs(rank, step);
    }
    /* From here on the other one may free it. */
    char done = 0;
    send_message(rank->other, &done, 1, -1);
    receive_message(rank->other, &done, 1);
    if (step > 1) {
        use_own(rank, step);
    }
    send_message(rank->other, &done, 1, -1);
    receive_message(rank->other, &done, 1);
    if (rank->late != 0) {
        CHECK(cuMemFreeAsync(rank->late, rank->stream));
        rank->late = 0;
    }
    rank->own = own;
    rank->message = theirs;
}

int main(int argc, char **argv) {
    int pair[2];
    SYSTEM(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair));
    pid_t child = fork();
    SYSTEM(child);
    int number = child == 0;
    close(pair[!number]);
    struct rank rank = {.number = (unsigned)number, .other = pair[number], .descriptor = -1};
    rank.job = job_start(argc, argv);
    CHECK(cuStreamCreate(&rank.stream, STREAM_NON_BLOCKING));
    CHECK(cuMemPoolCreate(&rank.pool, &exportable_pool));
    check_handle_types(rank.pool);
    for (unsigned step = 1; step <= rank.job.steps; step++) {
        one_step(&rank, step);
        if (number != 0) {
            send_message(rank.other, &rank.sum, sizeof rank.sum, -1);
            continue;
        }
        uint64_t theirs;
        receive_message(rank.other, &theirs, sizeof theirs);
        job_line(step, rank.sum * 31 + theirs);
    }
    /* The other one may still have what this one owns. */
    char over = 0;
    if (number != 0) {
        send_message(rank.other, &over, 1, -1);
        receive_message(rank.other, &over, 1);
        return 0;
    }
    receive_message(rank.other, &over, 1);
    send_message(rank.other, &over, 1, -1);
    int status;
    SYSTEM(waitpid(child, &status, 0));
    return status != 0;
}
