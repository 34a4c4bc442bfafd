// Makes and destroys NCCL's communicators as it is told on its standard input, and says what came of each step.
// usage: nccl [LIBRARY [OTHER...]] (compiled with -DLINKED it is linked against NCCL)
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct {
    char internal[128];
} id;

extern int cuInit(unsigned);

static void *library, *others[4];

#ifdef LINKED
#define FIND(name, type) \
    extern type name; \
    type *function = name
#else
#define FIND(name, type) type *function = dlsym(library, #name)
#endif

typedef int init_rank(void **, int, id, int);
typedef int init_config(void **, int, id, int, const int *);
typedef int init_scalable(void **, int, int, int, id *, const int *);
typedef int init_all(void **, int, const int *);
typedef int split(void *, int, int, void **, const int *);
typedef int shrink(void *, int *, int, void **, const int *, int);
typedef int grow(void *, int, const id *, int, void **, const int *);
typedef int all_reduce(const void *, void *, size_t, int, int, void *, void *);
typedef int end(void *);

static void *made[8];
static int config = 1000;

static int step(const char *what, int ranks)
{
    id ids[2] = {{{1, 2, 3}}, {{4, 5, 6}}};
    int devices[4] = {0, 1, 2, 3}, excluded = 7;
    if (!strcmp(what, "init")) {
        FIND(ncclCommInitRank, init_rank);
        return function(&made[0], ranks, ids[0], 0);
    } else if (!strcmp(what, "profiled")) {
        FIND(pncclCommInitRank, init_rank);
        return function(&made[0], ranks, ids[0], 0);
    } else if (!strcmp(what, "unprofile")) {
        FIND(pncclCommDestroy, end);
        return function(made[ranks]);
    } else if (!strcmp(what, "config")) {
        FIND(ncclCommInitRankConfig, init_config);
        return function(&made[0], ranks, ids[0], 1, &config);
    } else if (!strcmp(what, "scalable")) {
        FIND(ncclCommInitRankScalable, init_scalable);
        return function(&made[0], ranks, 1, 2, ids, &config);
    } else if (!strcmp(what, "all")) {
        FIND(ncclCommInitAll, init_all);
        return function(made, ranks, devices);
    } else if (!strcmp(what, "split")) {
        FIND(ncclCommSplit, split);
        return function(made[0], ranks, 1, &made[1], &config);
    } else if (!strcmp(what, "shrink")) {
        FIND(ncclCommShrink, shrink);
        return function(made[0], &excluded, ranks, &made[1], &config, 1);
    } else if (!strcmp(what, "grow")) {
        FIND(ncclCommGrow, grow);
        return function(made[0], ranks, &ids[1], -1, &made[1], &config);
    } else if (!strcmp(what, "reduce")) {
        FIND(ncclAllReduce, all_reduce);
        return function(NULL, NULL, 1, 7, 0, made[ranks], NULL);
    } else if (!strcmp(what, "speed")) {
        // The time of a call, in tenths of a nanosecond: the best of several runs.
        FIND(ncclAllReduce, all_reduce);
        struct timespec start, end;
        long best = -1;
        for (int run = 0; run < 10; run++) {
            clock_gettime(CLOCK_MONOTONIC, &start);
            for (int call = 0; call < ranks; call++)
                if (function(NULL, NULL, 1, 7, 0, made[0], NULL))
                    return -1;
            clock_gettime(CLOCK_MONOTONIC, &end);
            long took = (end.tv_sec - start.tv_sec) * 1000000000 + end.tv_nsec - start.tv_nsec;
            best = best < 0 || took < best ? took : best;
        }
        return (int)(best * 10 / ranks);
    } else if (!strcmp(what, "destroy")) {
        FIND(ncclCommDestroy, end);
        return function(made[ranks]);
    } else if (!strcmp(what, "abort")) {
        FIND(ncclCommAbort, end);
        return function(made[ranks]);
    } else if (!strcmp(what, "sum")) {
        FIND(ncclTestSum, end);
        return function(made[ranks]);
    } else if (!strcmp(what, "other")) {
        init_rank *function = dlsym(others[0], "ncclCommInitRank");
        return function(&made[0], ranks, ids[0], 0);
    } else if (!strcmp(what, "leave")) {
        end *function = dlsym(others[0], "ncclCommDestroy");
        return function(made[ranks]);
    } else if (!strcmp(what, "seek")) {
        return dlsym(others[ranks], "ncclCommInitRank") == NULL;
    } else if (!strcmp(what, "second")) {
        return dlsym(others[ranks], "pncclCommInitRank") == NULL;
    } else if (!strcmp(what, "bundle")) {
        int (*function)(void **, int) = dlsym(others[0], "bundle_init");
        return function(&made[0], ranks);
    } else if (!strcmp(what, "found")) {
        return dlsym(RTLD_DEFAULT, "ncclCommInitRank") != NULL;
    }
    abort();
}

int main(int count, char **arguments)
{
    char what[16];
    int number;
    if (cuInit(0))
        return 1;
    if (count > 1 && !(library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL)))
        return 2;
    for (int index = 2; index < count; index++)
        if (!(others[index - 2] = dlopen(arguments[index], RTLD_NOW | RTLD_LOCAL)))
            return 3;
    puts("ready");
    fflush(stdout);
    while (scanf("%15s %d", what, &number) == 2) {
        printf("%d\n", step(what, number));
        fflush(stdout);
    }
    return 0;
}
