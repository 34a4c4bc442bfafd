/* launches COUNT: launches an empty kernel so often, and waits for all of a part before the next; prints the seconds
 * that each of 40 parts took. */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define PARTS 40

#define CHECK(call)                                                                                                    \
    do {                                                                                                               \
        if ((call) != 0) {                                                                                             \
            fprintf(stderr, "launches: %s failed\n", #call);                                                           \
            return 1;                                                                                                  \
        }                                                                                                              \
    } while (0)

int cuInit(unsigned flags);
int cuCtxCreate_v2(void **context, unsigned flags, int device);
int cuCtxSynchronize(void);
int cuModuleLoadData(void **module, const void *image);
int cuModuleGetFunction(void **function, void *module, const char *name);
int cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned shared_bytes, void *stream, void **params,
                   void **extra);

static const char ptx[] = ".version 6.0\n.target sm_50\n.address_size 64\n.visible .entry nothing()\n{\n    ret;\n}\n";

int main(int count, char **arguments) {
    if (count != 2) {
        return 2;
    }
    long launches = atol(arguments[1]);
    void *context, *module, *function;
    CHECK(cuInit(0));
    CHECK(cuCtxCreate_v2(&context, 0, 0));
    CHECK(cuModuleLoadData(&module, ptx));
    CHECK(cuModuleGetFunction(&function, module, "nothing"));
    for (int part = 0; part < PARTS; part++) {
        struct timespec begun, ended;
        clock_gettime(CLOCK_MONOTONIC, &begun);
        for (long launch = 0; launch < launches / PARTS; launch++) {
            CHECK(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL));
        }
        CHECK(cuCtxSynchronize());
        clock_gettime(CLOCK_MONOTONIC, &ended);
        printf("%.9f\n", (double)(ended.tv_sec - begun.tv_sec) + (double)(ended.tv_nsec - begun.tv_nsec) / 1e9);
    }
    return 0;
}
