/* Memory that is still used by a process that has opened it when the one that it belonged to has ended. Once the file
 * `private` is there it goes on in memory of its own. The output is the same. */
#include "job.h"

#include <sys/wait.h>

typedef struct {
    char reserved[64];
} CUipcMemHandle;
CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address);
CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle handle, unsigned flags);
CUresult cuIpcCloseMemHandle(CUdeviceptr address);

enum { COUNT = 128 };

/* Gives out an allocation and ends when it is told to. */
static int child(int handles, int end, int argc, char **argv) {
    char byte;
    CUipcMemHandle handle;
    job_start(argc, argv);
    CHECK(cuIpcGetMemHandle(&handle, job_alloc(COUNT, 1)));
    SYSTEM(write(handles, &handle, sizeof handle));
    SYSTEM(read(end, &byte, 1));
    return 0;
}

int main(int argc, char **argv) {
    int handles[2], end[2];
    uint32_t words[COUNT];
    CUipcMemHandle handle;
    CUdeviceptr data;
    uint64_t sum = 0;
    int is_shared = 1;
    SYSTEM(pipe(handles));
    SYSTEM(pipe(end));
    pid_t pid = fork();
    SYSTEM(pid);
    if (pid == 0) {
        close(end[1]);
        return child(handles[1], end[0], argc, argv);
    }
    struct job job = job_start(argc, argv);
    if (read(handles[0], &handle, sizeof handle) != sizeof handle) {
        fprintf(stderr, "the child has gone\n");
        return 1;
    }
    CHECK(cuIpcOpenMemHandle_v2(&data, handle, 1));
    close(end[1]);
    SYSTEM(waitpid(pid, NULL, 0));
    for (unsigned step = 1; step <= job.steps; step++) {
        job_mix(&job, data, COUNT, step, NULL);
        CHECK(cuMemcpyDtoH_v2(words, data, sizeof words));
        if (is_shared && job_has_file("private")) {
            CHECK(cuIpcCloseMemHandle(data));
            data = job_alloc(COUNT, 0);
            CHECK(cuMemcpyHtoD_v2(data, words, sizeof words));
            is_shared = 0;
        }
        sum = job_hash(sum, words, COUNT);
        job_line(step, sum);
    }
    return 0;
}
