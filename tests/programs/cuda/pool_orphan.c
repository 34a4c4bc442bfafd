/* An allocation of a pool that is still used by a process that has imported it when the one that it belonged to has
 * destroyed the pool. Once the file `private` is there the program goes on in memory of its own. The output is the same. */
#include "shared_pools.h"

#include <sys/wait.h>

enum { COUNT = 128 };

/* Exports an allocation, and gives all up when it is told to. */
static int child(int other, int argc, char **argv) {
    struct export_data data;
    CUmemoryPool pool;
    CUdeviceptr address;
    int descriptor;
    char byte;
    job_start(argc, argv);
    CHECK(cuMemPoolCreate(&pool, &exportable_pool));
    CHECK(cuMemPoolExportToShareableHandle(&descriptor, pool, DESCRIPTOR, 0));
    CHECK(cuMemAllocFromPoolAsync(&address, COUNT * 4, pool, NULL));
    CHECK(cuMemsetD32_v2(address, 1, COUNT));
    CHECK(cuCtxSynchronize());
    CHECK(cuMemPoolExportPointer(&data, address));
    send_message(other, &data, sizeof data, descriptor);
    SYSTEM(close(descriptor));
    receive_message(other, &byte, 1);
    CHECK(cuMemFree_v2(address));
    CHECK(cuMemPoolDestroy(pool));
    send_message(other, &byte, 1, -1);
    /* It lives on until the other one has ended. */
    SYSTEM(read(other, &byte, 1));
    return 0;
}

int main(int argc, char **argv) {
    int pair[2];
    uint32_t words[COUNT];
    struct export_data exported;
    CUmemoryPool pool;
    CUdeviceptr data;
    uint64_t sum = 0;
    int is_shared = 1;
    SYSTEM(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair));
    pid_t pid = fork();
    SYSTEM(pid);
    close(pair[pid != 0]);
    if (pid == 0) {
        return child(pair[1], argc, argv);
    }
    struct job job = job_start(argc, argv);
    int descriptor = receive_message(pair[0], &exported, sizeof exported);
    CHECK(cuMemPoolImportFromShareableHandle(&pool, (void *)(uintptr_t)descriptor, DESCRIPTOR, 0));
    CHECK(cuMemPoolImportPointer(&data, pool, &exported));
    SYSTEM(close(descriptor));
    char byte = 0;
    send_message(pair[0], &byte, 1, -1);
    receive_message(pair[0], &byte, 1);
    for (unsigned step = 1; step <= job.steps; step++) {
        job_mix(&job, data, COUNT, step, NULL);
        CHECK(cuMemcpyDtoH_v2(words, data, sizeof words));
        if (is_shared && job_has_file("private")) {
            CHECK(cuMemFree_v2(data));
            data = job_alloc(COUNT, 0);
            CHECK(cuMemcpyHtoD_v2(data, words, sizeof words));
            is_shared = 0;
        }
        sum = job_hash(sum, words, COUNT);
        job_line(step, sum);
    }
    close(pair[0]);
    SYSTEM(waitpid(pid, NULL, 0));
    return 0;
}
