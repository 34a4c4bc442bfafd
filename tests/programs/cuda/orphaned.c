/* Two processes that share device memory: the first one uses what the second one has made. Their parent has no GPU, waits
 * for both, and fails when one of them does, once there is no file `linger`. */
#include <signal.h>
#include <sys/wait.h>

#include "job.h"

typedef struct {
    char reserved[64];
} CUipcMemHandle;
CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address);
CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle handle, unsigned flags);

enum { COUNT = 256 };

static int use(int handles, int argc, char **argv) {
    struct job job = job_start(argc, argv);
    CUipcMemHandle handle;
    CUdeviceptr data;
    uint32_t words[COUNT];
    if (read(handles, &handle, sizeof handle) != (ssize_t)sizeof handle) {
        fprintf(stderr, "no handle\n");
        return 1;
    }
    CHECK(cuIpcOpenMemHandle_v2(&data, handle, 1));
    for (unsigned step = 1; step <= job.steps; step++) {
        job_mix(&job, data, COUNT, step, NULL);
        CHECK(cuMemcpyDtoH_v2(words, data, sizeof words));
        job_line(step, job_hash(0, words, COUNT));
    }
    return 0;
}

static int own(int handles, int life, int argc, char **argv) {
    char end;
    CUipcMemHandle handle;
    job_start(argc, argv);
    CUdeviceptr data = job_alloc(COUNT, 1);
    CHECK(cuIpcGetMemHandle(&handle, data));
    SYSTEM(write(handles, &handle, sizeof handle));
    /* Until the other one has ended. */
    return read(life, &end, 1) == 0 ? 0 : 1;
}

int main(int argc, char **argv) {
    int handles[2], life[2], status;
    SYSTEM(pipe(handles));
    SYSTEM(pipe(life));
    pid_t user = fork();
    SYSTEM(user);
    if (user == 0) {
        return use(handles[0], argc, argv);
    }
    close(life[1]);
    pid_t owner = fork();
    SYSTEM(owner);
    if (owner == 0) {
        return own(handles[1], life[0], argc, argv);
    }
    for (int ended = 0; ended < 2; ended++) {
        SYSTEM(wait(&status));
        if (status != 0) {
            fprintf(stderr, "one of them has failed: status %#x\n", status);
            while (job_has_file("linger")) {
                usleep(1000);
            }
            kill(user, 9);
            return 1;
        }
    }
    return 0;
}
