/* ranks RANKS: so many processes train together for ever. An iteration is 10 ms of rest, as of work on the host, and two
 * all-reduces, the second of which needs the first. Prints "ready" when all ranks have made some iterations. For each
 * line of its standard input, it prints the median of the last iterations, seconds. */
#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

#include "nccl.h"

enum { ELEMENTS = 1 << 14, WARM = 20, KEPT = 31, WORK_US = 10000 };

struct shared {
    ncclUniqueId id;
    atomic_int has_id, warm;
    /* The durations of rank 0's last iterations. */
    _Atomic double took_s[KEPT];
};

static void be_rank(struct shared *shared, int ranks, int rank) {
    void *context, *stream;
    unsigned long long data;
    ncclComm_t comm;
    CHECK(cuInit(0));
    CHECK(cuCtxCreate_v2(&context, 0, rank));
    CHECK(cuStreamCreate(&stream, 1));
    CHECK(cuMemAlloc_v2(&data, ELEMENTS * 4));
    if (rank == 0) {
        CHECK(ncclGetUniqueId(&shared->id));
        shared->has_id = 1;
    }
    while (!shared->has_id) {
        usleep(1000);
    }
    CHECK(ncclCommInitRank(&comm, ranks, shared->id, rank));
    for (unsigned long step = 0;; step++) {
        double begun_s = now_s();
        usleep(WORK_US);
        for (int call = 0; call < 2; call++) {
            CHECK(ncclAllReduce((void *)data, (void *)data, ELEMENTS, UINT32, SUM, comm, stream));
        }
        CHECK(cuStreamSynchronize(stream));
        if (rank == 0) {
            shared->took_s[step % KEPT] = now_s() - begun_s;
        }
        if (step == WARM + KEPT) {
            shared->warm++;
        }
    }
}

static int compare(const void *one, const void *other) {
    double a = *(const double *)one, b = *(const double *)other;
    return (a > b) - (a < b);
}

int main(int count, char **arguments) {
    struct shared *shared =
        mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int ranks = count == 2 ? atoi(arguments[1]) : 0;
    if (ranks < 2 || shared == MAP_FAILED) {
        return 2;
    }
    for (int rank = 0; rank < ranks; rank++) {
        if (fork() == 0) {
            be_rank(shared, ranks, rank);
        }
    }
    while (shared->warm < ranks) {
        usleep(1000);
    }
    puts("ready");
    fflush(stdout);
    char line[16];
    while (fgets(line, sizeof line, stdin) != NULL) {
        double took_s[KEPT];
        for (int i = 0; i < KEPT; i++) {
            took_s[i] = shared->took_s[i];
        }
        qsort(took_s, KEPT, sizeof *took_s, compare);
        printf("%.6f\n", took_s[KEPT / 2]);
        fflush(stdout);
    }
    return 0;
}
