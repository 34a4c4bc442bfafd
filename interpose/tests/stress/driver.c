/* A driver that ends the process when a call comes while it is locked, or is inside when it is being locked. */
#include <stdatomic.h>
#include <stdlib.h>

static atomic_int inside, locked;

int cuInit(unsigned flags) {
    (void)flags;
    return 0;
}

int cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned shared_bytes, void *stream, void **params,
                   void **extra) {
    (void)function, (void)grid_x, (void)grid_y, (void)grid_z, (void)block_x, (void)block_y, (void)block_z;
    (void)shared_bytes, (void)stream, (void)params;
    atomic_fetch_add(&inside, 1);
    /* The eleventh parameter shows that all have come through. */
    if (atomic_load(&locked) || extra != (void **)11) {
        abort();
    }
    atomic_fetch_sub(&inside, 1);
    return 0;
}

int cuCheckpointProcessLock(int pid, void *args) {
    (void)pid, (void)args;
    atomic_store(&locked, 1);
    if (atomic_load(&inside)) {
        abort();
    }
    return 0;
}

int cuCheckpointProcessCheckpoint(int pid, void *args) {
    (void)pid, (void)args;
    return 0;
}

int cuCheckpointProcessRestore(int pid, void *args) {
    (void)pid, (void)args;
    return 0;
}

int cuCheckpointProcessUnlock(int pid, void *args) {
    (void)pid, (void)args;
    atomic_store(&locked, 0);
    return 0;
}
