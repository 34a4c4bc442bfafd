/* Frees all its device memory as soon as the file `free` is there, which the file `freed` says, and allocates some again
 * when it is gone. It prints a line every 10 ms, and ends when the file `end` is there.
 *
 *   frees 1 */
#include "job.h"

enum { BYTES = 4 << 20, COUNT = 256 };

int main(int argc, char **argv) {
    job_start(argc, argv);
    CUdeviceptr memory = job_alloc(BYTES / 4, 5);
    int is_free = 0;
    for (unsigned line = 1; !job_has_file("end"); line++) {
        if (!is_free && job_has_file("free")) {
            CHECK(cuMemFree_v2(memory));
            FILE *said = fopen("freed", "w");
            if (said == NULL || fclose(said) != 0) {
                perror("freed");
                return 1;
            }
            is_free = 1;
        } else if (is_free && !job_has_file("free")) {
            memory = job_alloc(BYTES / 4, 5);
            is_free = 0;
        }
        uint32_t words[COUNT] = {5};
        if (!is_free) {
            CHECK(cuMemcpyDtoH_v2(words, memory, sizeof words));
        }
        printf("line %u: %u\n", line, words[0]);
        fflush(stdout);
        usleep(10000);
    }
    printf("right\n");
    return 0;
}
