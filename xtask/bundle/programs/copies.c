/* copies BYTES: the speed of plain copies between device memory and pinned memory, the fastest of 8 each way, in 10^9
 * bytes per second: "TO_HOST TO_DEVICE". Of one copy, and of two halves on streams of their own, the faster counts. */
#include "cuda.h"

#include <string.h>

#define ROUNDS 8

static unsigned long long device;
static char *host;
static void *streams[2];

static void copy(int to_host, size_t at, size_t bytes, void *stream) {
    if (to_host) {
        CHECK(cuMemcpyDtoHAsync_v2(host + at, device + at, bytes, stream));
    } else {
        CHECK(cuMemcpyHtoDAsync_v2(device + at, host + at, bytes, stream));
    }
}

static double seconds(int to_host, int parts, size_t bytes) {
    double begun_s = now_s();
    for (int part = 0; part < parts; part++) {
        copy(to_host, bytes / (size_t)parts * (size_t)part, bytes / (size_t)parts, streams[part]);
    }
    for (int part = 0; part < parts; part++) {
        CHECK(cuStreamSynchronize(streams[part]));
    }
    return now_s() - begun_s;
}

int main(int argc, char **argv) {
    size_t bytes = argc == 2 ? strtoull(argv[1], NULL, 10) : 0;
    void *context;
    if (bytes < 2) {
        fprintf(stderr, "usage: copies BYTES\n");
        return 2;
    }
    CHECK(cuInit(0));
    CHECK(cuCtxCreate_v2(&context, 0, 0));
    CHECK(cuMemAlloc_v2(&device, bytes));
    CHECK(cuMemHostAlloc((void **)&host, bytes, 0));
    memset(host, 1, bytes);
    CHECK(cuStreamCreate(&streams[0], 1));
    CHECK(cuStreamCreate(&streams[1], 1));
    double best_s[2] = {1e30, 1e30};
    for (int round = 0; round < ROUNDS; round++) {
        for (int to_host = 0; to_host < 2; to_host++) {
            for (int parts = 1; parts <= 2; parts++) {
                double took_s = seconds(to_host, parts, bytes);
                best_s[to_host] = took_s < best_s[to_host] ? took_s : best_s[to_host];
            }
        }
    }
    printf("%.4f %.4f\n", (double)bytes / best_s[1] / 1e9, (double)bytes / best_s[0] / 1e9);
    return 0;
}
