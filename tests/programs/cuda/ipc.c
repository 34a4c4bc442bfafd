/* Two processes that share device memory. The parent mixes it, the child, which has opened it, hashes it. Once the file
 * `private` is there the child closes it and leaves that to the parent, which goes on in memory that it never gave out.
 * The output is the same. */
#include "job.h"

#include <sys/wait.h>

typedef struct {
    char reserved[64];
} CUipcMemHandle;
CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address);
CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle handle, unsigned flags);
CUresult cuIpcCloseMemHandle(CUdeviceptr address);

enum { COUNT = 128, BYTES = COUNT * 4 };

struct request {
    int is_shared;
    CUipcMemHandle handle;
};

static uint64_t hash_of(CUdeviceptr data) {
    uint32_t words[COUNT];
    CHECK(cuMemcpyDtoH_v2(words, data, BYTES));
    return job_hash(0, words, COUNT);
}

/* The same in other memory. */
static CUdeviceptr moved(CUdeviceptr data) {
    uint32_t words[COUNT];
    CUdeviceptr other = job_alloc(COUNT, 0);
    CHECK(cuMemcpyDtoH_v2(words, data, BYTES));
    CHECK(cuMemcpyHtoD_v2(other, words, BYTES));
    CHECK(cuMemFree_v2(data));
    return other;
}

/* Answers each request with the hash, or with 0 if nothing is shared any more. */
static int child(int requests, int answers, int argc, char **argv) {
    struct request request;
    CUdeviceptr opened = 0;
    job_start(argc, argv);
    while (read(requests, &request, sizeof request) == sizeof request) {
        uint64_t hash = 0;
        if (request.is_shared && opened == 0) {
            CHECK(cuIpcOpenMemHandle_v2(&opened, request.handle, 1));
        } else if (!request.is_shared && opened != 0) {
            CHECK(cuIpcCloseMemHandle(opened));
            opened = 0;
        }
        if (opened != 0) {
            hash = hash_of(opened);
        }
        SYSTEM(write(answers, &hash, sizeof hash));
    }
    return 0;
}

int main(int argc, char **argv) {
    int requests[2], answers[2];
    struct request request = {0};
    uint64_t sum = 0, hash;
    SYSTEM(pipe(requests));
    SYSTEM(pipe(answers));
    pid_t pid = fork();
    SYSTEM(pid);
    if (pid == 0) {
        close(requests[1]);
        close(answers[0]);
        return child(requests[0], answers[1], argc, argv);
    }
    close(requests[0]);
    close(answers[1]);
    struct job job = job_start(argc, argv);
    CUdeviceptr data = job_alloc(COUNT, 1);
    CHECK(cuIpcGetMemHandle(&request.handle, data));
    request.is_shared = 1;
    for (unsigned step = 1; step <= job.steps; step++) {
        job_mix(&job, data, COUNT, step, NULL);
        CHECK(cuCtxSynchronize());
        int becomes_private = request.is_shared && job_has_file("private");
        request.is_shared = request.is_shared && !becomes_private;
        SYSTEM(write(requests[1], &request, sizeof request));
        if (read(answers[0], &hash, sizeof hash) != sizeof hash) {
            fprintf(stderr, "the child has gone\n");
            return 1;
        }
        if (becomes_private) {
            data = moved(data);
        }
        sum = sum * 31 + (request.is_shared ? hash : hash_of(data));
        job_line(step, sum);
    }
    close(requests[1]);
    SYSTEM(waitpid(pid, NULL, 0));
    return 0;
}
