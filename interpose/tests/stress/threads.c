/* threads COUNT: so many threads launch without a pause; prints the launches of the thread that has the fewest
 * whenever it is asked by a line on standard input, and ends with the input. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#define MOST 64

int cuInit(unsigned flags);
int cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned shared_bytes, void *stream, void **params,
                   void **extra);

static atomic_long launched[MOST];

static void *launch(void *count) {
    for (;;) {
        if (cuLaunchKernel(NULL, 1, 2, 3, 4, 5, 6, 7, NULL, NULL, (void **)11) != 0) {
            abort();
        }
        atomic_fetch_add((atomic_long *)count, 1);
    }
    return NULL;
}

int main(int count, char **arguments) {
    int threads = count == 2 ? atoi(arguments[1]) : 0;
    if (threads < 1 || threads > MOST || cuInit(0) != 0) {
        return 2;
    }
    for (int i = 0; i < threads; i++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, launch, &launched[i]) != 0) {
            return 1;
        }
    }
    while (getchar() == '\n') {
        long fewest = launched[0];
        for (int i = 1; i < threads; i++) {
            fewest = launched[i] < fewest ? launched[i] : fewest;
        }
        printf("%ld\n", fewest);
        fflush(stdout);
    }
    return 0;
}
