/* Two processes that share device memory: the child writes to all of it, the parent owns it and says what is in it.
 *
 *   FLIPS MIB
 *
 * With the file `change`, the child writes the number in it, and deletes the file. With the file `pause`, the parent writes to
 * `paused` which number all of the memory holds, or that it holds several, and deletes the file. */
#include "job.h"

#include <sys/wait.h>

typedef struct {
    char reserved[64];
} CUipcMemHandle;
CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address);
CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle handle, unsigned flags);

static size_t count;

static void start(void) {
    CUdevice device;
    CUcontext context;
    CHECK(cuInit(0));
    CHECK(cuDeviceGet(&device, 0));
    CHECK(cuDevicePrimaryCtxRetain(&context, device));
    CHECK(cuCtxSetCurrent(context));
}

static void write_all(CUdeviceptr address, unsigned value) {
    CHECK(cuMemsetD32_v2(address, value, count));
    CHECK(cuCtxSynchronize());
}

static int child(int requests) {
    CUipcMemHandle handle;
    CUdeviceptr address;
    if (read(requests, &handle, sizeof handle) != (ssize_t)sizeof handle) {
        return 1;
    }
    start();
    CHECK(cuIpcOpenMemHandle_v2(&address, handle, 1));
    for (;; usleep(10000)) {
        FILE *file = fopen("change", "r");
        unsigned value;
        if (file == NULL) {
            continue;
        }
        if (fscanf(file, "%u", &value) == 1) {
            write_all(address, value);
            remove("change");
        }
        fclose(file);
    }
}

static void tell(CUdeviceptr address, uint32_t *words) {
    CHECK(cuMemcpyDtoH_v2(words, address, count * 4));
    FILE *file = fopen("paused", "w");
    size_t at = 0;
    while (at < count && words[at] == words[0]) {
        at++;
    }
    if (at == count) {
        fprintf(file, "%u\n", words[0]);
    } else {
        fprintf(file, "%u and %u at %zu\n", words[0], words[at], at);
    }
    fclose(file);
    remove("pause");
}

int main(int argc, char **argv) {
    if (argc != 2) {
        return 2;
    }
    count = strtoull(argv[1], NULL, 10) << 18;
    int requests[2];
    SYSTEM(pipe(requests));
    pid_t pid = fork();
    SYSTEM(pid);
    if (pid == 0) {
        close(requests[1]);
        return child(requests[0]);
    }
    CUipcMemHandle handle;
    CUdeviceptr address;
    uint32_t *words = malloc(count * 4);
    start();
    CHECK(cuMemAlloc_v2(&address, count * 4));
    write_all(address, 1);
    CHECK(cuIpcGetMemHandle(&handle, address));
    SYSTEM(write(requests[1], &handle, sizeof handle));
    puts("ready");
    fflush(stdout);
    for (;; usleep(10000)) {
        if (access("pause", F_OK) == 0) {
            tell(address, words);
        }
    }
}
