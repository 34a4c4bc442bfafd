/* allocations small|large LIVE: keeps so many allocations and replaces one after the other; prints the nanoseconds of
 * one cuMemFree and one cuMemAlloc, the fastest of some parts of the whole. It ends with its standard input.
 * allocations used: prints how many bytes of the device are in use. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define PARTS 10
#define PAIRS_IN_A_PART 1000
#define LARGE_BYTES ((size_t)2 << 20)

#define CHECK(call)                                                                                                    \
    do {                                                                                                               \
        int result = (call);                                                                                           \
        if (result != 0) {                                                                                             \
            fprintf(stderr, "allocations: %s: %d\n", #call, result);                                                   \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

int cuInit(unsigned flags);
int cuCtxCreate_v2(void **context, unsigned flags, int device);
int cuMemAlloc_v2(unsigned long long *address, size_t bytes);
int cuMemFree_v2(unsigned long long address);
int cuMemGetInfo_v2(size_t *free, size_t *total);

/* The same numbers in each run. */
static unsigned below(unsigned bound) {
    static unsigned long long state = 1;
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    return (unsigned)(state >> 33) % bound;
}

/* Of small ones as many small ones as larger ones on the scale of powers of two, up to 64 KiB. */
static size_t size_bytes(int is_large) {
    return is_large ? LARGE_BYTES : 1 + below(2u << below(16));
}

static double now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e9 + (double)now.tv_nsec;
}

int main(int argc, char **argv) {
    if (argc < 2) {
        return 2;
    }
    void *context;
    CHECK(cuInit(0));
    CHECK(cuCtxCreate_v2(&context, 0, 0));
    if (strcmp(argv[1], "used") == 0) {
        size_t free_bytes, total_bytes;
        CHECK(cuMemGetInfo_v2(&free_bytes, &total_bytes));
        printf("%zu\n", total_bytes - free_bytes);
        return 0;
    }
    int is_large = strcmp(argv[1], "large") == 0;
    unsigned live = argc > 2 ? (unsigned)atol(argv[2]) : 1;
    unsigned long long *places = calloc(live, sizeof *places);
    for (unsigned place = 0; place < live; place++) {
        CHECK(cuMemAlloc_v2(&places[place], size_bytes(is_large)));
    }
    double best_ns = 1e30;
    for (int part = 0; part < PARTS; part++) {
        double begun_ns = now_ns();
        for (int pair = 0; pair < PAIRS_IN_A_PART; pair++) {
            unsigned place = below(live);
            CHECK(cuMemFree_v2(places[place]));
            CHECK(cuMemAlloc_v2(&places[place], size_bytes(is_large)));
        }
        double took_ns = (now_ns() - begun_ns) / PAIRS_IN_A_PART;
        best_ns = took_ns < best_ns ? took_ns : best_ns;
    }
    printf("%.1f\n", best_ns);
    fflush(stdout);
    while (getchar() != EOF) {
    }
    return 0;
}
