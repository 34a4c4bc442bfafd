/* calls record|launch COUNT: calls one function of the driver so often; prints the nanoseconds of one call, the
 * fastest of 20 parts of the whole. */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define PARTS 20

int cuInit(unsigned flags);
int cuEventRecord(void *event, void *stream);
int cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned shared_bytes, void *stream, void **params,
                   void **extra);

static double now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e9 + (double)now.tv_nsec;
}

int main(int count, char **arguments) {
    if (count != 3 || cuInit(0) != 0) {
        return 2;
    }
    long calls = atol(arguments[2]) / PARTS;
    int launches = arguments[1][0] == 'l';
    double best_ns = 1e30;
    for (int part = 0; part < PARTS; part++) {
        double begun_ns = now_ns();
        if (launches) {
            for (long call = 0; call < calls; call++) {
                cuLaunchKernel(NULL, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
            }
        } else {
            for (long call = 0; call < calls; call++) {
                cuEventRecord(NULL, NULL);
            }
        }
        double took_ns = (now_ns() - begun_ns) / (double)calls;
        best_ns = took_ns < best_ns ? took_ns : best_ns;
    }
    printf("%.4f\n", best_ns);
    return 0;
}
