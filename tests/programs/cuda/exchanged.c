/* Processes in a ring that pass device memory to each other by descriptors. In each step every process makes memory,
 * exports it and tells the next one, which takes the descriptor (pidfd_getfd, as PyTorch does). Each process writes to
 * what it gets and passes its descriptor on, or a duplicate of it, until it is back at its owner: the driver does not
 * export what was imported. Some descriptors are always on their way: offered and not taken, or taken and not imported
 * yet. The owner gives its own part up before, while or after others have it. The output has a hash of all that was read in
 * each step. */
#include "vmm.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>

enum { RANKS = 3, COUNT = 128, BYTES = COUNT * 4, DESCRIPTOR = 1, LAG = 2, AHEAD = 12, MOST = 128 };

CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle, int type,
                                      unsigned long long flags);
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shareable, int type);

/* What goes around. Without a descriptor it says that the sender's step is over. */
struct message {
    unsigned step, owner, hop;
    int process, descriptor;
};

struct item {
    struct message message;
    int descriptor;
};

/* What a process gives up in a later step; 0 or -1 for what it has given up. */
struct late {
    unsigned step;
    CUmemGenericAllocationHandle handle;
    CUdeviceptr address;
    int descriptor;
};

struct rank {
    struct job job;
    unsigned number;
    int from, to;
    struct item items[MOST];
    unsigned count;
    struct late late[MOST];
    unsigned late_count;
    uint64_t sum;
};

static size_t granule_bytes;

static void fail(const char *what) {
    fprintf(stderr, "%s\n", what);
    exit(1);
}

static void put(int to, const void *data, size_t bytes) {
    if (write(to, data, bytes) != (ssize_t)bytes) {
        fail("another process has gone");
    }
}

/* What is in a pipe comes in one piece. */
static void get(int from, void *data, size_t bytes) {
    if (read(from, data, bytes) != (ssize_t)bytes) {
        fail("another process has gone");
    }
}

/* Tells the next process which descriptor of this one it has to take. */
static void send_item(int to, struct message message, int descriptor) {
    message.process = getpid();
    message.descriptor = descriptor;
    put(to, &message, sizeof message);
}

static struct item receive_item(int from) {
    struct item item = {.descriptor = -1};
    get(from, &item.message, sizeof item.message);
    if (item.message.descriptor >= 0) {
        int process = (int)syscall(SYS_pidfd_open, item.message.process, 0);
        SYSTEM(process);
        item.descriptor = (int)syscall(SYS_pidfd_getfd, process, item.message.descriptor, 0);
        SYSTEM(item.descriptor);
        close(process);
    }
    return item;
}

static CUdeviceptr map(CUmemGenericAllocationHandle handle) {
    CUdeviceptr address;
    CHECK(cuMemAddressReserve(&address, granule_bytes, 0, 0, 0));
    vmm_map(address, granule_bytes, handle);
    return address;
}

static void unmap(CUdeviceptr address) {
    CHECK(cuMemUnmap(address, granule_bytes));
    CHECK(cuMemAddressFree(address, granule_bytes));
}

static int export(CUmemGenericAllocationHandle handle) {
    int descriptor;
    CHECK(cuMemExportToShareableHandle(&descriptor, handle, DESCRIPTOR, 0));
    return descriptor;
}

static void add_late(struct rank *rank, struct late late) {
    if (rank->late_count == MOST) {
        fail("too much is given up later");
    }
    rank->late[rank->late_count++] = late;
}

static void give_up_later(struct rank *rank, unsigned step, CUmemGenericAllocationHandle handle, CUdeviceptr address) {
    add_late(rank, (struct late){step, handle, address, -1});
}

/* The next process takes it until this one is so far. */
static void close_later(struct rank *rank, unsigned step, int descriptor) {
    add_late(rank, (struct late){step + AHEAD, 0, 0, descriptor});
}

static void give_up(struct rank *rank, unsigned step) {
    unsigned kept = 0;
    for (unsigned i = 0; i < rank->late_count; i++) {
        struct late late = rank->late[i];
        if (late.step > step) {
            rank->late[kept++] = late;
            continue;
        }
        if (late.address != 0) {
            unmap(late.address);
        }
        if (late.handle != 0) {
            CHECK(cuMemRelease(late.handle));
        }
        if (late.descriptor >= 0) {
            SYSTEM(close(late.descriptor));
        }
    }
    rank->late_count = kept;
}

/* New memory, on its way to the next process. */
static void send_own(struct rank *rank, unsigned step) {
    struct allocation_prop prop = vmm_prop;
    CUmemGenericAllocationHandle handle;
    struct message message = {.step = step, .owner = rank->number, .hop = 1};
    prop.handle_types = DESCRIPTOR;
    CHECK(cuMemCreate(&handle, granule_bytes, &prop, 0));
    CUdeviceptr address = map(handle);
    CHECK(cuMemsetD32_v2(address, step * 1000 + rank->number, COUNT));
    CHECK(cuCtxSynchronize());
    int descriptor = export(handle), other;
    switch ((step + rank->number) % 4) {
    case 0: /* Only the descriptor holds it. */
        unmap(address);
        CHECK(cuMemRelease(handle));
        break;
    case 1: /* It is still the owner's when the next one has it. */
        give_up_later(rank, step + 1 + LAG, handle, address);
        break;
    case 2: /* Only the mapping is left, for a while. */
        CHECK(cuMemRelease(handle));
        give_up_later(rank, step + 2, 0, address);
        break;
    case 3: /* Another descriptor. */
        other = export(handle);
        SYSTEM(close(descriptor));
        descriptor = other;
        unmap(address);
        give_up_later(rank, step + 1, handle, 0);
        break;
    }
    send_item(rank->to, message, descriptor);
    close_later(rank, step, descriptor);
}

/* Reads and writes what has come, and passes it on. */
static void use(struct rank *rank, unsigned step, struct item item) {
    CUmemGenericAllocationHandle handle, again;
    uint32_t words[COUNT];
    CHECK(cuMemImportFromShareableHandle(&handle, (void *)(uintptr_t)item.descriptor, DESCRIPTOR));
    CHECK(cuMemImportFromShareableHandle(&again, (void *)(uintptr_t)item.descriptor, DESCRIPTOR));
    CUdeviceptr address = map(handle);
    CHECK(cuMemRelease(again));
    CHECK(cuMemcpyDtoH_v2(words, address, BYTES));
    rank->sum = job_hash(rank->sum, words, COUNT);
    job_mix(&rank->job, address, COUNT, item.message.step + item.message.hop, NULL);
    CHECK(cuMemcpyDtoH_v2(words, address, BYTES));
    rank->sum = job_hash(rank->sum, words, COUNT);
    int passed = item.descriptor;
    if ((item.message.step + rank->number) % 2 == 0) {
        /* Another one. */
        SYSTEM(passed = fcntl(item.descriptor, F_DUPFD_CLOEXEC, 0));
        SYSTEM(close(item.descriptor));
    }
    if (item.message.hop < RANKS) {
        struct message message = item.message;
        message.hop++;
        send_item(rank->to, message, passed);
        close_later(rank, step, passed);
    } else {
        SYSTEM(close(passed));
    }
    if ((item.message.step + item.message.hop) % 3 == 0) {
        give_up_later(rank, step + 1, handle, address);
    } else {
        CHECK(cuMemRelease(handle));
        unmap(address);
    }
}

/* Reads what the process before has sent in one step. */
static void receive_step(struct rank *rank, unsigned step) {
    for (;;) {
        struct item item = receive_item(rank->from);
        if (item.descriptor < 0) {
            if (item.message.step != step) {
                fprintf(stderr, "process %u: the end of step %u where that of %u has to be\n", rank->number,
                        item.message.step, step);
                exit(1);
            }
            return;
        }
        if (rank->count == MOST) {
            fail("too much has come");
        }
        rank->items[rank->count++] = item;
    }
}

static void one_step(struct rank *rank, unsigned step) {
    send_own(rank, step);
    for (unsigned i = 0; i < rank->count; i++) {
        use(rank, step, rank->items[i]);
    }
    rank->count = 0;
    give_up(rank, step);
    send_item(rank->to, (struct message){.step = step}, -1);
    if (step > LAG) {
        receive_step(rank, step - LAG);
    }
}

/* The reports of all others go to the first one, which prints. */
static void run(struct rank *rank, const int *reports) {
    granule_bytes = vmm_granularity_bytes();
    for (unsigned step = 1; step <= rank->job.steps; step++) {
        one_step(rank, step);
        if (rank->number > 0) {
            put(reports[rank->number], &rank->sum, sizeof rank->sum);
            continue;
        }
        uint64_t sum = rank->sum;
        for (int other = 1; other < RANKS; other++) {
            uint64_t theirs;
            get(reports[other], &theirs, sizeof theirs);
            sum = sum * 31 + theirs;
        }
        job_line(step, sum);
    }
    unsigned first = rank->job.steps > LAG ? rank->job.steps - LAG + 1 : 1;
    for (unsigned step = first; step <= rank->job.steps; step++) {
        receive_step(rank, step);
    }
    /* The others have taken everything from this one too. */
    uint64_t over = 0;
    if (rank->number > 0) {
        put(reports[rank->number], &over, sizeof over);
        get(reports[rank->number], &over, sizeof over);
        return;
    }
    for (int other = 1; other < RANKS; other++) {
        get(reports[other], &over, sizeof over);
    }
    for (int other = 1; other < RANKS; other++) {
        put(reports[other], &over, sizeof over);
    }
}

int main(int argc, char **argv) {
    int ring[RANKS][2], reports[RANKS][2], ends[RANKS];
    for (int number = 0; number < RANKS; number++) {
        SYSTEM(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ring[number]));
        SYSTEM(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, reports[number]));
    }
    int number = 0;
    for (int child = 1; child < RANKS && number == 0; child++) {
        pid_t pid = fork();
        SYSTEM(pid);
        number = pid == 0 ? child : 0;
    }
    /* What others have has to be seen to end. */
    for (int other = 0; other < RANKS; other++) {
        ends[other] = reports[other][number == 0 ? 0 : 1];
        close(reports[other][number == 0 ? 1 : 0]);
        if (other != number) {
            close(ring[other][0]);
            if (number != 0) {
                close(ends[other]);
            }
        }
        if (other != (number + 1) % RANKS) {
            close(ring[other][1]);
        }
    }
    struct rank rank = {.number = (unsigned)number, .from = ring[number][0], .to = ring[(number + 1) % RANKS][1]};
    rank.job = job_start(argc, argv);
    run(&rank, ends);
    if (number == 0) {
        while (wait(NULL) > 0) {
        }
    }
    return 0;
}
