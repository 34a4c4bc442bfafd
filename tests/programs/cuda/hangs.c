/* A stream that never ends: as soon as the file `hang` is there (it is removed), a host function in it waits for ever.
 * How the job waits for its stream is what HANGS_WAIT says: asleep if it is not set, otherwise with a CPU in use, in
 * cuStreamSynchronize (`stream`), in cuEventSynchronize (`event`), in a copy (`copy`), or by asking again and again
 * (`query`). As long as the file `compute` is there it uses the CPU and not the GPU. */
#include "job.h"

CUresult cuLaunchHostFunc(CUstream stream, void (*function)(void *), void *argument);
CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned flags);
CUresult cuEventSynchronize(CUevent event);
CUresult cuStreamQuery(CUstream stream);

enum { COUNT = 128, SCHED_SPIN = 1, NOT_READY = 600 };

static void wait_for_ever(void *nothing) {
    (void)nothing;
    for (;;) pause();
}

static void wait_for(CUstream stream, CUevent event, const char *how) {
    if (strcmp(how, "event") == 0) {
        CHECK(cuEventRecord(event, stream));
        CHECK(cuEventSynchronize(event));
    } else if (strcmp(how, "query") == 0) {
        CUresult answer;
        do answer = cuStreamQuery(stream);
        while (answer == NOT_READY);
        CHECK(answer);
    } else if (strcmp(how, "copy") != 0) {
        CHECK(cuStreamSynchronize(stream));
    }
}

int main(int argc, char **argv) {
    struct job job = job_start(argc, argv);
    const char *how = getenv("HANGS_WAIT");
    if (how) CHECK(cuDevicePrimaryCtxSetFlags_v2(0, SCHED_SPIN));
    else how = "";
    CUdeviceptr data = job_alloc(COUNT, 1);
    CUstream stream;
    /* A copy waits for what the default stream waits for. */
    CHECK(cuStreamCreate(&stream, strcmp(how, "copy") == 0 ? 0 : STREAM_NON_BLOCKING));
    CUevent event;
    CHECK(cuEventCreate(&event, 0));
    for (unsigned step = 1; step <= job.steps; step++) {
        job_mix(&job, data, COUNT, step, stream);
        if (unlink("hang") == 0) CHECK(cuLaunchHostFunc(stream, wait_for_ever, NULL));
        wait_for(stream, event, how);
        uint32_t words[COUNT];
        CHECK(cuMemcpyDtoH_v2(words, data, sizeof words));
        job_line(step, job_hash(0, words, COUNT));
        while (job_has_file("compute")) {
        }
    }
    return 0;
}
