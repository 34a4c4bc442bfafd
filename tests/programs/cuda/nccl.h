/* Ranks of NCCL: the declarations that they need, their processes, and where they get the unique IDs. */
#ifndef NCCL_H
#define NCCL_H

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "job.h"

CUresult cuDeviceGetCount(int *count);

typedef struct ncclComm *ncclComm_t;
typedef struct {
    char internal[128];
} ncclUniqueId;
int ncclGetUniqueId(ncclUniqueId *id);
int ncclCommInitRank(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank);
int ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *out, void *config);
int ncclCommDestroy(ncclComm_t comm);
int ncclGroupStart(void);
int ncclGroupEnd(void);
int ncclAllReduce(const void *send, void *recv, size_t count, int type, int op, ncclComm_t comm, CUstream stream);
int ncclReduceScatter(const void *send, void *recv, size_t count, int type, int op, ncclComm_t comm, CUstream stream);
int ncclAllGather(const void *send, void *recv, size_t count, int type, ncclComm_t comm, CUstream stream);
int ncclBroadcast(const void *send, void *recv, size_t count, int type, int root, ncclComm_t comm, CUstream stream);
int ncclSend(const void *send, size_t count, int type, int to, ncclComm_t comm, CUstream stream);
int ncclRecv(void *recv, size_t count, int type, int from, ncclComm_t comm, CUstream stream);
const char *ncclGetErrorString(int result);
enum { UINT32 = 3, SUM = 0, MAX = 2 };

#define NCCL(call)                                                                                                     \
    do {                                                                                                               \
        int result_ = (call);                                                                                          \
        if (result_ != 0) {                                                                                            \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, ncclGetErrorString(result_));                \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

enum { MOST_RANKS = 8, MOST_IDS = 4 };

/* Where rank 0 leaves the unique IDs; shared by all processes of a machine. */
struct meeting {
    ncclUniqueId ids[MOST_IDS];
    volatile int are_there;
};

/* The ranks of this machine, and the file by which the machines learn the IDs, if there are several. */
struct part {
    int first, count;
    const char *file;
};

/* The device, the context and the kernel of a rank. The devices are shared if there are fewer than ranks. */
static inline struct job nccl_start(int rank) {
    struct job job = {0};
    int devices;
    CUdevice device;
    CHECK(cuInit(0));
    CHECK(cuDeviceGetCount(&devices));
    CHECK(cuDeviceGet(&device, rank % devices));
    CHECK(cuDevicePrimaryCtxRetain(&job.context, device));
    CHECK(cuCtxSetCurrent(job.context));
    CHECK(cuModuleLoadData(&job.module, job_ptx));
    CHECK(cuModuleGetFunction(&job.mix, job.module, "mix"));
    return job;
}

/* Gives the IDs to the other machines. */
static inline void nccl_publish(const struct meeting *meeting, const char *file) {
    char temporary[4096];
    snprintf(temporary, sizeof temporary, "%s.new", file);
    int fd = open(temporary, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    SYSTEM(fd);
    if (write(fd, meeting->ids, sizeof meeting->ids) != sizeof meeting->ids) {
        perror(temporary);
        exit(1);
    }
    SYSTEM(close(fd));
    SYSTEM(rename(temporary, file));
}

/* Takes them from the machine of rank 0. */
static inline void nccl_learn(struct meeting *meeting, const char *file) {
    int fd;
    while ((fd = open(file, O_RDONLY)) < 0 && errno == ENOENT) {
        usleep(1000);
    }
    SYSTEM(fd);
    if (read(fd, meeting->ids, sizeof meeting->ids) != sizeof meeting->ids) {
        perror(file);
        exit(1);
    }
    SYSTEM(close(fd));
}

/* Rank 0 makes the IDs, the others wait for them. */
static inline void nccl_meet(struct meeting *meeting, int rank) {
    if (rank == 0) {
        for (int i = 0; i < MOST_IDS; i++) {
            NCCL(ncclGetUniqueId(&meeting->ids[i]));
        }
        meeting->are_there = 1;
    }
    while (!meeting->are_there) {
        usleep(1000);
    }
}

/* Whether the ranks end after this step: rank 0 has found the file `enough`. `word` is for that question. */
static inline int nccl_is_enough(unsigned step, ncclComm_t comm, CUdeviceptr word, CUstream stream) {
    enum { ASKED_EACH = 4 };
    if (step % ASKED_EACH != 0) {
        return 0;
    }
    uint32_t is_enough = access("enough", F_OK) == 0;
    CHECK(cuMemcpyHtoD_v2(word, &is_enough, 4));
    NCCL(ncclBroadcast((void *)word, (void *)word, 1, UINT32, 0, comm, stream));
    CHECK(cuStreamSynchronize(stream));
    CHECK(cuMemcpyDtoH_v2(&is_enough, word, 4));
    return (int)is_enough;
}

/* Runs the ranks of this machine, a process each. The exit code is 1 as soon as one has failed. */
static inline int nccl_run_part(struct part part, int (*be_rank)(int rank, struct meeting *meeting)) {
    struct meeting *meeting =
        mmap(NULL, sizeof *meeting, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (meeting == MAP_FAILED) {
        perror("mmap");
        return 1;
    }
    for (int rank = part.first; rank < part.first + part.count; rank++) {
        pid_t pid = fork();
        SYSTEM(pid);
        if (pid == 0) {
            return be_rank(rank, meeting);
        }
    }
    if (part.file != NULL && part.first > 0) {
        nccl_learn(meeting, part.file);
        meeting->are_there = 1;
    } else if (part.file != NULL) {
        while (!meeting->are_there) {
            usleep(1000);
        }
        nccl_publish(meeting, part.file);
    }
    for (int ended = 0; ended < part.count; ended++) {
        int status;
        SYSTEM(wait(&status));
        if (status != 0) {
            fprintf(stderr, "a rank has failed: status %#x\n", status);
            return 1;
        }
    }
    return 0;
}

/* Runs so many ranks, all of them on this machine. */
static inline int nccl_run(int ranks, int (*be_rank)(int rank, struct meeting *meeting)) {
    return nccl_run_part((struct part){.count = ranks}, be_rank);
}

#endif
