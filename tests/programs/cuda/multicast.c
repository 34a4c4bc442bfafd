/* Two devices whose memory is reached at one address, by multicast objects. The devices are those of one process or, with
 * a second argument of 2, of two processes, which pass the objects by descriptors. One object lives as long as the
 * program, bound by handle. In each step another one is made, bound by address and used; it lives for two steps, and its
 * handle is sometimes released earlier than its mapping. The output has a hash of all memory of each step.
 *
 * It ends early, after a whole step, when the file `end` is there. It stands still while the file `pause` is there, which
 * the file `paused` says. Faults of the simulated driver are the first process's only. */
#include "vmm.h"

#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>

enum { DEVICES = 2, COUNT = 128, DESCRIPTOR = 1 };

struct object_prop {
    unsigned devices;
    size_t bytes;
    unsigned long long handle_types, flags;
};
CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle, int type,
                                      unsigned long long flags);
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shareable, int type);
CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address);
CUresult cuMulticastCreate(CUmemGenericAllocationHandle *object, const struct object_prop *prop);
CUresult cuMulticastGetGranularity(size_t *bytes, const struct object_prop *prop, int option);
CUresult cuMulticastAddDevice(CUmemGenericAllocationHandle object, CUdevice device);
CUresult cuMulticastBindMem(CUmemGenericAllocationHandle object, size_t offset, CUmemGenericAllocationHandle memory,
                            size_t memory_offset, size_t bytes, unsigned long long flags);
CUresult cuMulticastBindAddr(CUmemGenericAllocationHandle object, size_t offset, CUdeviceptr address, size_t bytes,
                             unsigned long long flags);
CUresult cuMulticastUnbind(CUmemGenericAllocationHandle object, CUdevice device, size_t offset, size_t bytes);

/* total(team, out): out[i] = the sum of team[i] over the devices; add(team, value): team[i] += value ^ i on each. */
static const char team_ptx[] =
    ".version 8.1\n"
    ".target sm_90\n"
    ".address_size 64\n"
    ".visible .entry total(.param .u64 p0, .param .u64 p1)\n"
    "{\n"
    "    .reg .b32 %r<4>;\n"
    "    .reg .b64 %rd<8>;\n"
    "    ld.param.u64 %rd1, [p0];\n"
    "    ld.param.u64 %rd2, [p1];\n"
    "    mov.u32 %r1, %tid.x;\n"
    "    mul.wide.u32 %rd3, %r1, 4;\n"
    "    add.s64 %rd4, %rd1, %rd3;\n"
    "    add.s64 %rd5, %rd2, %rd3;\n"
    "    multimem.ld_reduce.relaxed.sys.global.add.u32 %r2, [%rd4];\n"
    "    st.global.u32 [%rd5], %r2;\n"
    "    ret;\n"
    "}\n"
    ".visible .entry add(.param .u64 p0, .param .u32 p1)\n"
    "{\n"
    "    .reg .b32 %r<4>;\n"
    "    .reg .b64 %rd<8>;\n"
    "    ld.param.u64 %rd1, [p0];\n"
    "    ld.param.u32 %r1, [p1];\n"
    "    mov.u32 %r2, %tid.x;\n"
    "    mul.wide.u32 %rd3, %r2, 4;\n"
    "    add.s64 %rd4, %rd1, %rd3;\n"
    "    xor.b32 %r3, %r1, %r2;\n"
    "    multimem.red.relaxed.sys.global.add.u32 [%rd4], %r3;\n"
    "    ret;\n"
    "}\n";

/* A device of this process, and what it has of an object. */
struct device {
    CUdevice number;
    CUcontext context;
    CUfunction mix, total, add;
    CUmemGenericAllocationHandle memory;
    /* Two parts of a granule each. */
    CUdeviceptr address, out, team[3];
};

/* A program, or one of two. `to` and `from` are the other one's. */
struct rank {
    int number, ranks, to, from;
    struct device devices[DEVICES];
    unsigned count;
    uint64_t sum;
};

static size_t granule;

static void put(const struct rank *rank, uint64_t word) {
    if (write(rank->to, &word, sizeof word) != sizeof word) {
        exit(1);
    }
}

static uint64_t get(const struct rank *rank) {
    uint64_t word;
    if (read(rank->from, &word, sizeof word) != sizeof word) {
        exit(1);
    }
    return word;
}

/* All work of both processes has ended. */
static void meet(const struct rank *rank) {
    for (unsigned i = 0; i < rank->count; i++) {
        CHECK(cuCtxSetCurrent(rank->devices[i].context));
        CHECK(cuCtxSynchronize());
    }
    if (rank->ranks == 2) {
        put(rank, 0);
        get(rank);
    }
}

static CUdeviceptr map(const struct device *device, CUmemGenericAllocationHandle handle, size_t bytes) {
    struct access access = {.location = {.type = 1, .id = device->number}, .flags = 3};
    CUdeviceptr address;
    CHECK(cuMemAddressReserve(&address, bytes, 0, 0, 0));
    CHECK(cuMemMap(address, bytes, 0, handle, 0));
    CHECK(cuMemSetAccess(address, bytes, &access, 1));
    return address;
}

static void start(struct device *device, int number) {
    struct allocation_prop prop = vmm_prop;
    CUmodule mix, team;
    prop.handle_types = DESCRIPTOR;
    prop.location.id = number;
    CHECK(cuDeviceGet(&device->number, number));
    CHECK(cuDevicePrimaryCtxRetain(&device->context, device->number));
    CHECK(cuCtxSetCurrent(device->context));
    CHECK(cuModuleLoadData(&mix, job_ptx));
    CHECK(cuModuleGetFunction(&device->mix, mix, "mix"));
    CHECK(cuModuleLoadData(&team, team_ptx));
    CHECK(cuModuleGetFunction(&device->total, team, "total"));
    CHECK(cuModuleGetFunction(&device->add, team, "add"));
    CHECK(cuMemCreate(&device->memory, 3 * granule, &prop, 0));
    device->address = map(device, device->memory, 3 * granule);
    CHECK(cuMemsetD32_v2(device->address, 1 + number, 3 * granule / 4));
    device->out = job_alloc(COUNT, 0);
}

/* An object of all devices, which the first process makes. */
static CUmemGenericAllocationHandle object(const struct rank *rank, size_t bytes) {
    struct object_prop prop = {DEVICES, bytes, rank->ranks == 2 ? DESCRIPTOR : 0, 0};
    CUmemGenericAllocationHandle handle;
    int descriptor;
    if (rank->number == 0) {
        CHECK(cuMulticastCreate(&handle, &prop));
    }
    if (rank->ranks == 2 && rank->number == 0) {
        CHECK(cuMemExportToShareableHandle(&descriptor, handle, DESCRIPTOR, 0));
        put(rank, (uint64_t)getpid() << 32 | (unsigned)descriptor);
        get(rank);
        SYSTEM(close(descriptor));
    } else if (rank->ranks == 2) {
        uint64_t where = get(rank);
        int process = (int)syscall(SYS_pidfd_open, (pid_t)(where >> 32), 0);
        SYSTEM(process);
        descriptor = (int)syscall(SYS_pidfd_getfd, process, (int)(uint32_t)where, 0);
        SYSTEM(descriptor);
        put(rank, 0);
        CHECK(cuMemImportFromShareableHandle(&handle, (void *)(uintptr_t)descriptor, DESCRIPTOR));
        SYSTEM(close(process));
        SYSTEM(close(descriptor));
    }
    for (unsigned i = 0; i < rank->count; i++) {
        CHECK(cuMulticastAddDevice(handle, rank->devices[i].number));
    }
    /* Binding would wait inside the driver. */
    meet(rank);
    return handle;
}

/* The object of a step has a granule, at one of two places of each device's memory. */
static void open_step(struct rank *rank, unsigned step) {
    CUmemGenericAllocationHandle handle = object(rank, granule);
    for (unsigned i = 0; i < rank->count; i++) {
        struct device *device = &rank->devices[i];
        CHECK(cuMulticastBindAddr(handle, 0, device->address + (1 + step % 2) * granule, granule, 0));
        device->team[1 + step % 2] = map(device, handle, granule);
    }
    if (step % 3 != 0) {
        CHECK(cuMemRelease(handle));
    }
}

static void close_step(struct rank *rank, unsigned step) {
    CUmemGenericAllocationHandle handle;
    CHECK(cuMemRetainAllocationHandle(&handle, (void *)rank->devices[0].team[1 + step % 2]));
    for (unsigned i = 0; i < rank->count; i++) {
        struct device *device = &rank->devices[i];
        CHECK(cuMulticastUnbind(handle, device->number, 0, granule));
        CHECK(cuMemUnmap(device->team[1 + step % 2], granule));
        CHECK(cuMemAddressFree(device->team[1 + step % 2], granule));
    }
    CHECK(cuMemRelease(handle));
    if (step % 3 == 0) {
        CHECK(cuMemRelease(handle));
    }
}

static void hash(struct rank *rank, CUdeviceptr address) {
    uint32_t words[COUNT];
    CHECK(cuMemcpyDtoH_v2(words, address, sizeof words));
    rank->sum = job_hash(rank->sum, words, COUNT);
}

/* What is behind an object's beginning on each device is `place` bytes into its memory. */
static void use(struct rank *rank, unsigned team, size_t place, unsigned step) {
    for (unsigned i = 0; i < rank->count; i++) {
        struct device *device = &rank->devices[i];
        CUdeviceptr data = device->address + place;
        unsigned count = COUNT, salt = step * 10 + device->number;
        void *params[] = {&data, &count, &salt};
        CHECK(cuCtxSetCurrent(device->context));
        CHECK(cuLaunchKernel(device->mix, 2, 1, 1, 64, 1, 1, 0, NULL, params, NULL));
    }
    meet(rank);
    for (unsigned i = 0; i < rank->count; i++) {
        struct device *device = &rank->devices[i];
        void *params[] = {&device->team[team], &device->out};
        CHECK(cuCtxSetCurrent(device->context));
        CHECK(cuLaunchKernel(device->total, 1, 1, 1, COUNT, 1, 1, 0, NULL, params, NULL));
    }
    meet(rank);
    for (unsigned i = 0; i < rank->count; i++) {
        struct device *device = &rank->devices[i];
        unsigned value = step * 7 + device->number;
        void *params[] = {&device->team[team], &value};
        CHECK(cuCtxSetCurrent(device->context));
        CHECK(cuLaunchKernel(device->add, 1, 1, 1, COUNT, 1, 1, 0, NULL, params, NULL));
    }
    meet(rank);
    for (unsigned i = 0; i < rank->count; i++) {
        CHECK(cuCtxSetCurrent(rank->devices[i].context));
        hash(rank, rank->devices[i].out);
        hash(rank, rank->devices[i].address + place);
    }
}

static void run(struct rank *rank, unsigned steps) {
    struct object_prop prop = {DEVICES, 1 << 20, 0, 0};
    CHECK(cuInit(0));
    CHECK(cuMulticastGetGranularity(&granule, &prop, 0));
    for (unsigned i = 0; i < rank->count; i++) {
        start(&rank->devices[i], rank->number + (int)i);
    }
    CUmemGenericAllocationHandle lasting = object(rank, 2 * granule);
    for (unsigned i = 0; i < rank->count; i++) {
        struct device *device = &rank->devices[i];
        /* The first part of the object has no memory. */
        CHECK(cuMulticastBindMem(lasting, granule, device->memory, 0, granule, 0));
        device->team[0] = map(device, lasting, 2 * granule) + granule;
    }
    for (unsigned step = 1; step <= steps; step++) {
        open_step(rank, step);
        meet(rank);
        use(rank, 0, 0, step);
        use(rank, 1 + step % 2, (1 + step % 2) * granule, step);
        meet(rank);
        if (step > 1) {
            close_step(rank, step - 1);
        }
        if (rank->number == 1) {
            put(rank, rank->sum);
            steps = get(rank) ? step : steps;
            continue;
        }
        uint64_t sum = rank->ranks == 2 ? rank->sum * 31 + get(rank) : rank->sum;
        job_pause_if_told();
        steps = job_has_file("end") ? step : steps;
        if (rank->ranks == 2) {
            put(rank, steps == step);
        }
        job_line(step, sum);
    }
    meet(rank);
    if (rank->number == 0) {
        printf("at last %016llx\n", (unsigned long long)rank->sum);
    }
}

int main(int argc, char **argv) {
    struct rank rank = {.ranks = argc == 3 ? atoi(argv[2]) : 1};
    unsigned steps = argc > 1 ? (unsigned)atoi(argv[1]) : 0;
    int ends[2];
    if (steps == 0 || rank.ranks < 1 || rank.ranks > 2) {
        fprintf(stderr, "usage: %s STEPS [PROCESSES]\n", argv[0]);
        return 2;
    }
    rank.count = DEVICES / (unsigned)rank.ranks;
    if (rank.ranks == 2) {
        SYSTEM(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends));
        pid_t child = fork();
        SYSTEM(child);
        rank.number = child == 0;
        rank.to = rank.from = ends[rank.number];
        close(ends[1 - rank.number]);
        if (rank.number == 1) {
            unsetenv("SIMCUDA_FAULT_FILE");
        }
    }
    run(&rank, steps);
    if (rank.ranks == 2 && rank.number == 0) {
        while (wait(NULL) > 0) {
        }
    }
    return 0;
}
