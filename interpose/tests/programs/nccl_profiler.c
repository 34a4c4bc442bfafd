// Stands for a profiler of NCCL: it defines calls and goes on to NCCL's second names for them.
typedef struct {
    char internal[128];
} id;

extern int pncclCommInitRank(void **, int, id, int);
extern int pncclCommDestroy(void *);

int ncclCommInitRank(void **out, int ranks, id id, int rank) { return pncclCommInitRank(out, ranks, id, rank); }

int ncclCommDestroy(void *of) { return pncclCommDestroy(of); }
