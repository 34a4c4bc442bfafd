/* Four processes that share device memory and all write to it, one after the other. The parent gives out a large and a
 * small allocation, the first child another one. One child closes and opens what is the parent's again and again. That
 * each finds its memory where it was is checked at each step. */
#include "job.h"

#include <sys/wait.h>

typedef struct {
    char reserved[64];
} CUipcMemHandle;
CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address);
CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle handle, unsigned flags);
CUresult cuIpcCloseMemHandle(CUdeviceptr address);
CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr address);

enum { CHILDREN = 3, COUNT = 128, LARGE = 1 << 20, REOPENS_EACH = 7 };

/* An allocation of some process. */
struct memory {
    CUdeviceptr address;
    CUipcMemHandle handle;
    unsigned count;
};

struct pipes {
    int requests[2], answers[2];
};

static void put(int to, const void *data, size_t bytes) {
    if (write(to, data, bytes) != (ssize_t)bytes) {
        perror("write");
        exit(1);
    }
}

/* What is in a pipe comes in one piece. */
static int get(int from, void *data, size_t bytes) {
    ssize_t got = read(from, data, bytes);
    SYSTEM(got);
    return got == (ssize_t)bytes;
}

static struct memory own(unsigned count, unsigned value) {
    struct memory memory = {.address = job_alloc(count, value), .count = count};
    CHECK(cuIpcGetMemHandle(&memory.handle, memory.address));
    return memory;
}

static struct memory received(int from) {
    struct memory memory;
    if (!get(from, &memory, sizeof memory)) {
        fprintf(stderr, "the other one has gone\n");
        exit(1);
    }
    CHECK(cuIpcOpenMemHandle_v2(&memory.address, memory.handle, 1));
    return memory;
}

/* A hash of the beginning and the end, where it is expected to be. */
static uint64_t hash_of(const struct memory *memory, uint64_t sum) {
    uint32_t words[2 * COUNT];
    CUdeviceptr base, again;
    size_t bytes;
    CHECK(cuMemGetAddressRange_v2(&base, &bytes, memory->address + 4));
    CHECK(cuMemcpyDtoH_v2(words, memory->address, COUNT * 4));
    CHECK(cuMemcpyDtoH_v2(words + COUNT, memory->address + (memory->count - COUNT) * 4ul, COUNT * 4));
    if (base != memory->address || bytes != memory->count * 4ul) {
        fprintf(stderr, "%zu bytes at %llx\n", bytes, base);
        exit(1);
    }
    /* Its own cannot be opened, and another one's is where it is. */
    if (cuIpcOpenMemHandle_v2(&again, memory->handle, 1) == 0) {
        if (again != memory->address) {
            fprintf(stderr, "it is at %llx, and now at %llx\n", memory->address, again);
            exit(1);
        }
        CHECK(cuIpcCloseMemHandle(again));
    }
    return job_hash(sum, words, 2 * COUNT);
}

static int child(int number, struct pipes *pipes, int argc, char **argv) {
    int requests = pipes->requests[0], answers = pipes->answers[1];
    struct job job = job_start(argc, argv);
    struct memory large = received(requests), small = received(requests), other;
    if (number == 0) {
        other = own(LARGE, 3);
        put(answers, &other, sizeof other);
    } else {
        other = received(requests);
    }
    unsigned step;
    while (get(requests, &step, sizeof step)) {
        if (number == 1 && step % REOPENS_EACH == 0) {
            CHECK(cuIpcCloseMemHandle(large.address));
            CHECK(cuIpcOpenMemHandle_v2(&large.address, large.handle, 1));
        }
        job_mix(&job, large.address, COUNT, step + number, NULL);
        job_mix(&job, other.address + (LARGE - COUNT) * 4ul, COUNT, step * 3 + number, NULL);
        CHECK(cuCtxSynchronize());
        uint64_t sum = hash_of(&other, hash_of(&small, hash_of(&large, number)));
        put(answers, &sum, sizeof sum);
    }
    return 0;
}

int main(int argc, char **argv) {
    struct pipes pipes[CHILDREN];
    for (int number = 0; number < CHILDREN; number++) {
        SYSTEM(pipe(pipes[number].requests));
        SYSTEM(pipe(pipes[number].answers));
        pid_t pid = fork();
        SYSTEM(pid);
        if (pid == 0) {
            /* The end of the parent has to be seen. */
            for (int earlier = 0; earlier <= number; earlier++) {
                close(pipes[earlier].requests[1]);
            }
            return child(number, &pipes[number], argc, argv);
        }
        close(pipes[number].requests[0]);
        close(pipes[number].answers[1]);
    }
    struct job job = job_start(argc, argv);
    struct memory large = own(LARGE, 1), small = own(COUNT, 2), other;
    for (int number = 0; number < CHILDREN; number++) {
        put(pipes[number].requests[1], &large, sizeof large);
        put(pipes[number].requests[1], &small, sizeof small);
        if (number == 0) {
            other = received(pipes[0].answers[0]);
        } else {
            put(pipes[number].requests[1], &other, sizeof other);
        }
    }
    uint64_t sum = 0;
    for (unsigned step = 1; step <= job.steps; step++) {
        job_mix(&job, small.address, COUNT, step, NULL);
        CHECK(cuCtxSynchronize());
        for (int number = 0; number < CHILDREN; number++) {
            uint64_t theirs;
            put(pipes[number].requests[1], &step, sizeof step);
            if (!get(pipes[number].answers[0], &theirs, sizeof theirs)) {
                fprintf(stderr, "a child has gone\n");
                return 1;
            }
            sum = sum * 31 + theirs;
        }
        job_line(step, sum ^ hash_of(&other, hash_of(&large, 0)));
    }
    for (int number = 0; number < CHILDREN; number++) {
        close(pipes[number].requests[1]);
    }
    while (wait(NULL) > 0) {
    }
    return 0;
}
