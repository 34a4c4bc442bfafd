/* collectives all-reduce|wrapped|group|exchange COUNT: makes an all-reduce, a group of one all-reduce as PyTorch makes them, a
 * group of two of them on two communicators, or a group of a send and a receive so often; prints the nanoseconds of one, the
 * fastest of 20 parts of the whole. */
#include "nccl.h"

#define PARTS 20

static ncclComm_t first, second;

static inline void reduce(ncclComm_t comm) {
    ncclAllReduce(NULL, NULL, 1, UINT32, SUM, comm, NULL);
}

static void all_reduce(long calls) {
    for (long call = 0; call < calls; call++) {
        reduce(first);
    }
}

static void wrapped(long calls) {
    for (long call = 0; call < calls; call++) {
        ncclGroupStart();
        reduce(first);
        ncclGroupEnd();
    }
}

static void group(long calls) {
    for (long call = 0; call < calls; call++) {
        ncclGroupStart();
        reduce(first);
        reduce(second);
        ncclGroupEnd();
    }
}

static void exchange(long calls) {
    for (long call = 0; call < calls; call++) {
        ncclGroupStart();
        ncclSend(NULL, 1, UINT32, 1, first, NULL);
        ncclRecv(NULL, 1, UINT32, 1, first, NULL);
        ncclGroupEnd();
    }
}

int main(int count, char **arguments) {
    if (count != 3 || cuInit(0) != 0) {
        return 2;
    }
    first = of_two_ranks();
    second = of_two_ranks();
    char of = arguments[1][0];
    void (*kind)(long) = of == 'a' ? all_reduce : of == 'w' ? wrapped : of == 'g' ? group : exchange;
    long calls = atol(arguments[2]) / PARTS;
    double best_s = 1e30;
    for (int part = 0; part < PARTS; part++) {
        double begun_s = now_s();
        kind(calls);
        double took_s = (now_s() - begun_s) / (double)calls;
        best_s = took_s < best_s ? took_s : best_s;
    }
    printf("%.4f\n", best_s * 1e9);
    return 0;
}
