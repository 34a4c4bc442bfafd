/* NCCL whose functions return at once, with communicators that are there in name only: what is left of a call's time is
 * the interposer's. */
#include <stddef.h>

typedef struct ncclComm *ncclComm_t;
typedef struct {
    char internal[128];
} ncclUniqueId;

static char communicators[8];
static int count;

int ncclGetUniqueId(ncclUniqueId *id) {
    *id = (ncclUniqueId){{(char)(count + 1)}};
    return 0;
}

int ncclCommInitRank(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank) {
    (void)ranks, (void)id, (void)rank;
    *comm = (ncclComm_t)&communicators[count++];
    return 0;
}

int ncclAllReduce(const void *send, void *recv, size_t elements, int type, int op, ncclComm_t comm, void *stream) {
    (void)send, (void)recv, (void)elements, (void)type, (void)op, (void)comm, (void)stream;
    return 0;
}

int ncclSend(const void *send, size_t elements, int type, int to, ncclComm_t comm, void *stream) {
    (void)send, (void)elements, (void)type, (void)to, (void)comm, (void)stream;
    return 0;
}

int ncclRecv(void *recv, size_t elements, int type, int from, ncclComm_t comm, void *stream) {
    (void)recv, (void)elements, (void)type, (void)from, (void)comm, (void)stream;
    return 0;
}

int ncclGroupStart(void) {
    return 0;
}

int ncclGroupEnd(void) {
    return 0;
}
