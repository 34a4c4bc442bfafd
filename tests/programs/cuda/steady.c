/* Has memory of every kind that leaves the device for a checkpoint, all of it from the beginning on, and changes it in
 * each step. It makes no call between two steps but to launch and to copy, so that a test can count the others.
 *
 *   steady STEPS PIECES [maps]
 *
 * With `maps`, a thread maps and unmaps host memory all the time, and looks whether what it has written is still there. A
 * file whose name is not UTF-8 is mapped beside it.
 * Once the file `change` is there, it retains its context another time, and removes the file.
 * It ends early, after a whole step, when the file `end` is there. It stands still while the file `pause` is there, which
 * the file `paused` says. */
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>

#include "vmm.h"

enum { COUNT = 256, BYTES = COUNT * 4, MOST = 256, RING = 64 };

static void fill(CUdeviceptr address, unsigned value) {
    CHECK(cuMemsetD32_v2(address, value, COUNT));
    CHECK(cuStreamSynchronize(NULL));
}

static uint64_t look(uint64_t sum, CUdeviceptr address) {
    uint32_t words[COUNT];
    CHECK(cuMemcpyDtoH_v2(words, address, BYTES));
    return job_hash(sum, words, COUNT);
}

static CUdeviceptr reserve(size_t bytes) {
    CUdeviceptr address;
    CHECK(cuMemAddressReserve(&address, bytes, 0, 0, 0));
    return address;
}

/* Memory that can only be read, and memory that is mapped nowhere. */
static CUmemGenericAllocationHandle created(CUdeviceptr address, size_t bytes, unsigned value) {
    CUmemGenericAllocationHandle handle;
    CHECK(cuMemCreate(&handle, bytes, &vmm_prop, 0));
    vmm_map(address, bytes, handle);
    fill(address, value);
    return handle;
}

static void map_file(void) {
    int file = open("caf\xe9", O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, 4096) != 0 ||
        mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) == MAP_FAILED) {
        perror("a mapped file");
        exit(1);
    }
}

static void *map_all_the_time(void *unused) {
    static struct mapping {
        uint64_t *words;
        size_t bytes;
    } ring[RING];
    uint64_t random = 88172645463325252ull;
    for (size_t turn = 0;; turn++) {
        struct mapping *mapping = &ring[turn % RING];
        for (size_t at = 0; at < mapping->bytes / 8; at += 512) {
            if (mapping->words[at] != (uint64_t)(uintptr_t)&mapping->words[at]) {
                fprintf(stderr, "steady: memory at %p was overwritten\n", (void *)&mapping->words[at]);
                exit(1);
            }
        }
        if (mapping->bytes > 0) {
            SYSTEM(munmap(mapping->words, mapping->bytes));
        }
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        mapping->bytes = 4096ul << random % 10;
        mapping->words = mmap(NULL, mapping->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (mapping->words == MAP_FAILED) {
            perror("mmap");
            exit(1);
        }
        for (size_t at = 0; at < mapping->bytes / 8; at += 512) {
            mapping->words[at] = (uint64_t)(uintptr_t)&mapping->words[at];
        }
    }
    return unused;
}

int main(int argc, char **argv) {
    struct job job = job_start(argc >= 3 ? 2 : argc, argv);
    unsigned pieces = argc >= 3 ? (unsigned)atoi(argv[2]) : 0;
    size_t granule = vmm_granularity_bytes();
    CUdeviceptr memory[MOST], small, read_only = reserve(granule), nowhere = reserve(granule);
    if (pieces == 0 || pieces > MOST) {
        return 2;
    }
    for (unsigned i = 0; i < pieces; i++) {
        CHECK(cuMemAlloc_v2(&memory[i], granule));
        fill(memory[i], i);
    }
    CHECK(cuMemAlloc_v2(&small, BYTES));
    fill(small, 77);
    struct access reading = {.location = {.type = 1}, .flags = 1};
    created(read_only, granule, 78);
    CHECK(cuMemSetAccess(read_only, granule, &reading, 1));
    CUmemGenericAllocationHandle handle = created(nowhere, granule, 79);
    CHECK(cuMemUnmap(nowhere, granule));
    if (argc > 3) {
        pthread_t thread;
        map_file();
        if (pthread_create(&thread, NULL, map_all_the_time, NULL) != 0) {
            return 1;
        }
    }
    uint64_t sum = 0;
    for (unsigned step = 1; step <= job.steps; step++) {
        job_mix(&job, small, COUNT, step, NULL);
        sum = look(look(sum, small), read_only);
        for (unsigned i = 0; i < pieces; i++) {
            job_mix(&job, memory[i], COUNT, step + i, NULL);
            sum = look(sum, memory[i]);
        }
        job_pause_if_told();
        if (job_has_file("change")) {
            CUcontext context;
            CHECK(cuDevicePrimaryCtxRetain(&context, 0));
            SYSTEM(unlink("change"));
        }
        if (job_has_file("end")) {
            job.steps = step;
        }
        job_line(step, sum);
    }
    vmm_map(nowhere, granule, handle);
    printf("at last %016llx\n", (unsigned long long)look(sum, nowhere));
    return 0;
}
