// Does with device memory what it is told, a line each, and answers with a line: what was asked for, "ok" or an error.
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

typedef unsigned long long CUdeviceptr;
typedef struct { unsigned char bytes[64]; } CUipcMemHandle;
extern int cuInit(unsigned), cuDevicePrimaryCtxRetain(void **, int), cuCtxSetCurrent(void *);
extern int cuMemAlloc_v2(CUdeviceptr *, size_t), cuMemFree_v2(CUdeviceptr);
extern int cuMemcpyDtoH_v2(void *, CUdeviceptr, size_t), cuMemsetD32_v2(CUdeviceptr, unsigned, size_t);
extern int cuMemGetAddressRange_v2(CUdeviceptr *, size_t *, CUdeviceptr), cuCtxSynchronize(void);
extern int cuIpcGetMemHandle(CUipcMemHandle *, CUdeviceptr), cuIpcCloseMemHandle(CUdeviceptr);
extern int cuIpcOpenMemHandle_v2(CUdeviceptr *, CUipcMemHandle, unsigned);
extern int cuIpcOpenMemHandle(CUdeviceptr *, CUipcMemHandle, unsigned);

static void answer(int error)
{
    if (error)
        printf("error %d\n", error);
    else
        puts("ok");
}

static void answer_address(int error, CUdeviceptr address)
{
    if (error)
        answer(error);
    else
        printf("0x%llx\n", address);
}

static void get(CUdeviceptr address)
{
    CUipcMemHandle handle;
    int error = cuIpcGetMemHandle(&handle, address);
    if (error)
        return answer(error);
    for (int i = 0; i < 64; i++)
        printf("%02x", handle.bytes[i]);
    puts("");
}

static void do_open(const char *text, int is_legacy)
{
    CUipcMemHandle handle;
    CUdeviceptr address = 0;
    for (int i = 0; i < 64; i++)
        sscanf(text + 2 * i, "%2hhx", &handle.bytes[i]);
    int error = is_legacy ? cuIpcOpenMemHandle(&address, handle, 1) : cuIpcOpenMemHandle_v2(&address, handle, 1);
    answer_address(error, address);
}

static void look(CUdeviceptr address)
{
    unsigned word = 0;
    CUdeviceptr base = 0;
    size_t bytes = 0;
    int error = cuMemcpyDtoH_v2(&word, address, 4);
    if (!error)
        error = cuMemGetAddressRange_v2(&base, &bytes, address);
    if (error)
        return answer(error);
    printf("%u at %llu of %zu\n", word, address - base, bytes);
}

int main(void)
{
    char line[512], what[16], text[256];
    void *context;
    if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context))
        return 1;
    setlinebuf(stdout);
    puts("ready");
    while (fgets(line, sizeof line, stdin)) {
        CUdeviceptr address;
        unsigned value = 0, count = 0;
        if (sscanf(line, "%15s %255s %u %u", what, text, &value, &count) < 2)
            return 2;
        address = strtoull(text, NULL, 0);
        if (!strcmp(what, "alloc")) {
            CUdeviceptr fresh = 0;
            int error = cuMemAlloc_v2(&fresh, address);
            answer_address(error, fresh);
        } else if (!strcmp(what, "free")) {
            answer(cuMemFree_v2(address));
        } else if (!strcmp(what, "fill")) {
            int error = cuMemsetD32_v2(address, value, count);
            answer(error ? error : cuCtxSynchronize());
        } else if (!strcmp(what, "look")) {
            look(address);
        } else if (!strcmp(what, "get")) {
            get(address);
        } else if (!strcmp(what, "open")) {
            do_open(text, 0);
        } else if (!strcmp(what, "open-legacy")) {
            do_open(text, 1);
        } else if (!strcmp(what, "close")) {
            answer(cuIpcCloseMemHandle(address));
        } else {
            return 2;
        }
    }
    return 0;
}
