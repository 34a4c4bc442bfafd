// Stands for NCCL: communicators that know their ranks. With SALT it is another copy of it. One of three ranks takes
// until the file NCCL_PEER is there.
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#ifndef SALT
#define SALT 0
#endif

typedef struct {
    char internal[128];
} id;
typedef struct {
    int ranks, sum;
} *communicator;

static int make(communicator *out, int ranks, int sum)
{
    if (ranks < 0)
        return 4;
    *out = malloc(sizeof **out);
    (*out)->ranks = ranks;
    (*out)->sum = sum;
    return 0;
}

static int sum_of(const id *id)
{
    int sum = SALT;
    for (int index = 0; index < 128; index++)
        sum += id->internal[index] * (index + 1);
    return sum;
}

int ncclCommInitRank(communicator *out, int ranks, id id, int rank)
{
    if (ranks == 3) {
        puts("waits");
        fflush(stdout);
        while (access(getenv("NCCL_PEER"), F_OK))
            usleep(1000);
    }
    return make(out, ranks, sum_of(&id) + rank);
}

// Not NCCL's: a library that has NCCL in itself calls it.
int bundle_init(communicator *out, int ranks)
{
    id id = {{1, 2, 3}};
    return ncclCommInitRank(out, ranks, id, 0);
}

int ncclCommInitRankConfig(communicator *out, int ranks, id id, int rank, const int *config)
{
    return make(out, ranks, sum_of(&id) + rank + *config);
}

int ncclCommInitRankScalable(communicator *out, int ranks, int rank, int count, id *ids, const int *config)
{
    return make(out, ranks, sum_of(&ids[count - 1]) + rank + *config);
}

int ncclCommInitAll(communicator *out, int count, const int *devices)
{
    for (int index = 0; index < count; index++)
        make(&out[index], count, devices[index]);
    return 0;
}

// Colours are parts of one rank, but for 2.
int ncclCommSplit(communicator of, int color, int key, communicator *out, const int *config)
{
    *out = NULL;
    return color < 0 ? 0 : make(out, color == 2 ? 2 : 1, of->sum + key + *config);
}

int ncclCommShrink(communicator of, int *excluded, int count, communicator *out, const int *config, int flags)
{
    return make(out, of->ranks - count, *excluded + *config + flags);
}

int ncclCommGrow(communicator of, int ranks, const id *id, int rank, communicator *out, const int *config)
{
    return make(out, ranks, of->sum + sum_of(id) + rank + *config);
}

int ncclCommCount(communicator of, int *ranks)
{
    *ranks = of->ranks;
    return 0;
}

int ncclAllReduce(const void *from, void *to, size_t count, int type, int op, communicator of, void *stream)
{
    return of && from == to && count == 1 && type == 7 && op == 0 && !stream ? 0 : 4;
}

// Not NCCL's: what was passed.
int ncclTestSum(communicator of) { return of->sum; }

int ncclCommDestroy(communicator of)
{
    if (!of)
        return 4;
    free(of);
    return 0;
}

int ncclCommAbort(communicator of) { return ncclCommDestroy(of); }

// NCCL's calls have second names, for profilers.
int pncclCommInitRank(communicator *, int, id, int) __attribute__((alias("ncclCommInitRank")));
int pncclCommDestroy(communicator) __attribute__((alias("ncclCommDestroy")));
