/* Forks a worker while another thread initialises the driver: when the file `fork` is there, which it answers by the file
 * `forked`. The worker lives as long as the job. */
#include <fcntl.h>
#include <pthread.h>

#include "job.h"

enum { COUNT = 256 };

static void *initialise(void *unused) {
    (void)unused;
    CHECK(cuInit(0));
    return NULL;
}

static void serve(int requests, int answers) {
    uint32_t state = 1, request;
    while (read(requests, &request, sizeof request) == (ssize_t)sizeof request) {
        state = state * 1664525 + request;
        SYSTEM(write(answers, &state, sizeof state));
    }
    exit(0);
}

int main(int argc, char **argv) {
    pthread_t initialising;
    int requests[2], answers[2];
    if (pthread_create(&initialising, NULL, initialise, NULL) != 0) {
        fprintf(stderr, "no thread\n");
        return 1;
    }
    /* In an unbroken run there is nobody to make the file. */
    int is_told = getenv("CKPT_FAULT_FILE") != NULL;
    while (is_told && !job_has_file("fork")) {
        usleep(1000);
    }
    SYSTEM(pipe(requests));
    SYSTEM(pipe(answers));
    pid_t worker = fork();
    SYSTEM(worker);
    if (worker == 0) {
        close(requests[1]);
        close(answers[0]);
        serve(requests[0], answers[1]);
    }
    close(requests[0]);
    close(answers[1]);
    if (is_told) {
        SYSTEM(open("forked", O_RDWR | O_CREAT | O_CLOEXEC, 0644));
    }
    pthread_join(initialising, NULL);
    struct job job = job_start(argc, argv);
    CUdeviceptr data = job_alloc(COUNT, 1);
    uint32_t words[COUNT], answer = 0;
    for (unsigned step = 1; step <= job.steps; step++) {
        SYSTEM(write(requests[1], &step, sizeof step));
        if (read(answers[0], &answer, sizeof answer) != (ssize_t)sizeof answer) {
            fprintf(stderr, "no answer of the worker\n");
            return 1;
        }
        job_mix(&job, data, COUNT, step + answer, NULL);
        CHECK(cuMemcpyDtoH_v2(words, data, sizeof words));
        if (job_has_file("end")) {
            job.steps = step;
        }
        job_line(step, job_hash(answer, words, COUNT));
    }
    printf("the worker at last %u\n", answer);
    return 0;
}
