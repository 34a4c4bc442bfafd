/* The few declarations of the driver API that are needed, so that no toolkit has to be installed; and a clock. */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

int cuInit(unsigned flags);
int cuCtxCreate_v2(void **context, unsigned flags, int device);
int cuCtxSynchronize(void);
int cuStreamCreate(void **stream, unsigned flags);
int cuStreamSynchronize(void *stream);
int cuMemAlloc_v2(unsigned long long *address, size_t bytes);
int cuMemHostAlloc(void **address, size_t bytes, unsigned flags);
int cuMemsetD32_v2(unsigned long long address, unsigned value, size_t count);
int cuMemsetD32Async(unsigned long long address, unsigned value, size_t count, void *stream);
int cuMemcpyDtoH_v2(void *to, unsigned long long from, size_t bytes);
int cuMemcpyDtoHAsync_v2(void *to, unsigned long long from, size_t bytes, void *stream);
int cuMemcpyHtoDAsync_v2(unsigned long long to, const void *from, size_t bytes, void *stream);
int cuGetErrorName(int error, const char **name);

#define CHECK(call)                                                                                                    \
    do {                                                                                                               \
        int error_ = (call);                                                                                           \
        if (error_ != 0) {                                                                                             \
            const char *name_ = "?";                                                                                   \
            cuGetErrorName(error_, &name_);                                                                            \
            fprintf(stderr, "%s: %s (%d)\n", #call, name_, error_);                                                    \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}
