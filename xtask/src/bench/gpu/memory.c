/* memory PROCESSES BYTES COUNT allocated|noise|module: so many processes, each of which fills so much device memory, in so
 * many allocations, or in a module's variable, which is none of ours and goes the driver's own way. With noise, no two parts
 * of it have the same content, and none can be compressed. Each prints "ready".
 * The first one then reads numbers from its standard input: it changes so many percent of its memory and prints
 * "changed". */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CHECK(call)                                                                                                    \
    do {                                                                                                               \
        int result = (call);                                                                                           \
        if (result != 0) {                                                                                             \
            fprintf(stderr, "memory: %s: %d\n", #call, result);                                                        \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

int cuInit(unsigned flags);
int cuCtxCreate_v2(void **context, unsigned flags, int device);
int cuCtxSynchronize(void);
int cuMemAlloc_v2(unsigned long long *address, size_t bytes);
int cuMemcpyHtoD_v2(unsigned long long to, const void *from, size_t bytes);
int cuMemsetD32_v2(unsigned long long address, unsigned value, size_t count);
int cuModuleLoadData(void **module, const void *image);
int cuModuleGetGlobal_v2(unsigned long long *address, size_t *bytes, void *module, const char *name);

static unsigned long long *places;
static size_t count, each_bytes;
/* Content to copy from, with noise. */
static unsigned long long *noise;

static unsigned long long of_a_module(size_t bytes) {
    char ptx[256];
    void *module;
    unsigned long long address;
    snprintf(ptx, sizeof ptx,
             ".version 6.0\n.target sm_50\n.address_size 64\n.visible .global .align 256 .b8 memory[%zu];\n", bytes);
    CHECK(cuModuleLoadData(&module, ptx));
    CHECK(cuModuleGetGlobal_v2(&address, NULL, module, "memory"));
    return address;
}

/* Marsaglia's xorshift, which goes on from one part to the next. */
static void make_noise(size_t words) {
    static unsigned long long state = 88172645463325252ULL;
    for (size_t word = 0; word < words; word++) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        noise[word] = state;
    }
}

/* Writes what was never there before. */
static void change(size_t percent) {
    static unsigned value;
    size_t left_bytes = count * each_bytes * percent / 100;
    for (size_t place = 0; left_bytes > 0; place++) {
        size_t bytes = left_bytes < each_bytes ? left_bytes : each_bytes;
        if (noise == NULL) {
            CHECK(cuMemsetD32_v2(places[place], ++value, bytes / 4));
        } else {
            make_noise(bytes / 8);
            CHECK(cuMemcpyHtoD_v2(places[place], noise, bytes / 8 * 8));
        }
        left_bytes -= bytes;
    }
    CHECK(cuCtxSynchronize());
}

static void say(const char *word) {
    puts(word);
    fflush(stdout);
}

int main(int argc, char **argv) {
    if (argc != 5) {
        return 2;
    }
    int is_first = 1;
    for (int process = 1; process < atoi(argv[1]) && is_first; process++) {
        is_first = fork() != 0;
    }
    count = strtoull(argv[3], NULL, 10);
    each_bytes = strtoull(argv[2], NULL, 10) / count / 4 * 4;
    places = calloc(count, sizeof *places);
    if (strcmp(argv[4], "noise") == 0) {
        noise = malloc(each_bytes);
    }
    void *context;
    CHECK(cuInit(0));
    CHECK(cuCtxCreate_v2(&context, 0, 0));
    for (size_t place = 0; place < count; place++) {
        if (strcmp(argv[4], "module") == 0) {
            places[place] = of_a_module(each_bytes);
        } else {
            CHECK(cuMemAlloc_v2(&places[place], each_bytes));
        }
    }
    change(100);
    say("ready");
    unsigned percent;
    while (is_first && scanf("%u", &percent) == 1) {
        change(percent);
        say("changed");
    }
    while (!is_first) {
        pause();
    }
    return 0;
}
