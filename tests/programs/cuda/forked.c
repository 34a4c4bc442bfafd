/* Workers that are forked after cuInit, as those of a DataLoader: they live as long as the job and hand it numbers. One
 * of them is replaced every few steps, and each says that the driver does not work in it. */
#include "job.h"

#include <sys/wait.h>

enum { COUNT = 256, WORKERS = 3, LIFE = 7, NOT_INITIALIZED = 3 };

struct worker {
    pid_t pid;
    int requests, answers;
};

static void serve(int requests, int answers) {
    uint32_t state = 1, request;
    CUdeviceptr address;
    while (read(requests, &request, sizeof request) == (ssize_t)sizeof request) {
        state = state * 1664525 + request;
        uint32_t answer = state ^ (uint32_t)(cuMemAlloc_v2(&address, 4) == NOT_INITIALIZED);
        SYSTEM(write(answers, &answer, sizeof answer));
    }
    exit(0);
}

static struct worker begin(void) {
    int requests[2], answers[2];
    struct worker worker;
    SYSTEM(pipe(requests));
    SYSTEM(pipe(answers));
    SYSTEM(worker.pid = fork());
    if (worker.pid == 0) {
        close(requests[1]);
        close(answers[0]);
        serve(requests[0], answers[1]);
    }
    close(requests[0]);
    close(answers[1]);
    worker.requests = requests[1];
    worker.answers = answers[0];
    return worker;
}

static uint32_t ask(const struct worker *worker, uint32_t request) {
    uint32_t answer = 0;
    SYSTEM(write(worker->requests, &request, sizeof request));
    if (read(worker->answers, &answer, sizeof answer) != (ssize_t)sizeof answer) {
        fprintf(stderr, "no answer of a worker\n");
        exit(1);
    }
    return answer;
}

static void end(struct worker *worker) {
    int status;
    close(worker->requests);
    close(worker->answers);
    SYSTEM(waitpid(worker->pid, &status, 0));
    if (status != 0) {
        fprintf(stderr, "a worker ended with status %d\n", status);
        exit(1);
    }
}

int main(int argc, char **argv) {
    struct job job = job_start(argc, argv);
    CUdeviceptr data = job_alloc(COUNT, 1);
    struct worker workers[WORKERS];
    uint32_t words[COUNT];
    /* A later worker must not hold the pipes of an earlier one, which would then never see their end. */
    for (unsigned i = 0; i < WORKERS; i++) {
        workers[i] = begin();
    }
    for (unsigned step = 1; step <= job.steps; step++) {
        uint32_t salt = 0;
        if (step % LIFE == 0) {
            struct worker *last = &workers[WORKERS - 1];
            end(last);
            *last = begin();
        }
        for (unsigned i = 0; i < WORKERS; i++) {
            salt = salt * 31 + ask(&workers[i], step);
        }
        job_mix(&job, data, COUNT, salt, NULL);
        CHECK(cuMemcpyDtoH_v2(words, data, sizeof words));
        job_line(step, job_hash(salt, words, COUNT));
    }
    for (unsigned i = WORKERS; i-- > 0;) {
        end(&workers[i]);
    }
    return 0;
}
