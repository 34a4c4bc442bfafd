/* Sixteen threads, each with memory of its own and on its own default stream: what a program compiled with
 * --default-stream per-thread calls. A line when all have made a step; at the end the checksum of each. */
#include "job.h"

#include <pthread.h>
#include <stdatomic.h>

CUresult cuMemcpyHtoD_v2_ptds(CUdeviceptr to, const void *from, size_t bytes);
CUresult cuMemcpyDtoHAsync_v2_ptsz(void *to, CUdeviceptr from, size_t bytes, CUstream stream);
CUresult cuMemsetD32Async_ptsz(CUdeviceptr to, unsigned value, size_t count, CUstream stream);
CUresult cuLaunchKernel_ptsz(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                             unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream stream, void **params,
                             void **extra);
CUresult cuStreamSynchronize_ptsz(CUstream stream);
CUresult cuMemAllocHost_v2(void **address, size_t bytes);

enum { THREADS = 16, COUNT = 64, BYTES = COUNT * 4 };

struct thread {
    const struct job *job;
    pthread_t id;
    unsigned number;
    atomic_uint done;
    uint64_t sum;
};

static void *work(void *argument) {
    struct thread *thread = argument;
    CUdeviceptr data;
    uint32_t *words;
    unsigned count = COUNT, salt;
    CHECK(cuCtxSetCurrent(thread->job->context));
    CHECK(cuMemAllocHost_v2((void **)&words, BYTES));
    CHECK(cuMemAlloc_v2(&data, BYTES));
    for (unsigned i = 0; i < COUNT; i++) {
        words[i] = thread->number * COUNT + i;
    }
    CHECK(cuMemcpyHtoD_v2_ptds(data, words, BYTES));
    for (unsigned step = 1; step <= thread->job->steps; step++) {
        void *params[] = {&data, &count, &salt};
        salt = step;
        CHECK(cuMemsetD32Async_ptsz(data + step % COUNT * 4, step, 1, NULL));
        CHECK(cuLaunchKernel_ptsz(thread->job->mix, 1, 1, 1, COUNT, 1, 1, 0, NULL, params, NULL));
        CHECK(cuMemcpyDtoHAsync_v2_ptsz(words, data, BYTES, NULL));
        CHECK(cuStreamSynchronize_ptsz(NULL));
        thread->sum = job_hash(thread->sum, words, COUNT);
        atomic_store(&thread->done, step);
        job_rest();
    }
    return NULL;
}

int main(int argc, char **argv) {
    struct job job = job_start(argc, argv);
    static struct thread threads[THREADS];
    for (unsigned i = 0; i < THREADS; i++) {
        threads[i].job = &job;
        threads[i].number = i;
        if (pthread_create(&threads[i].id, NULL, work, &threads[i]) != 0) {
            fprintf(stderr, "a thread cannot be started\n");
            return 1;
        }
    }
    for (unsigned step = 1; step <= job.steps; step++) {
        for (unsigned i = 0; i < THREADS; i++) {
            while (atomic_load(&threads[i].done) < step) {
                usleep(1000);
            }
        }
        printf("step %u\n", step);
        fflush(stdout);
    }
    for (unsigned i = 0; i < THREADS; i++) {
        pthread_join(threads[i].id, NULL);
        printf("thread %u checksum %016llx\n", i, (unsigned long long)threads[i].sum);
    }
    return 0;
}
