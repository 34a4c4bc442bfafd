/* What the jobs here share: the declarations that they need, so that no toolkit has to be installed, a kernel, and a
 * line of output for each step.
 *
 *   JOB STEPS
 *
 * State is on the device. A job rests after each step as long as the file `slow` is in the working directory, and ten
 * times as long in the second half, so that a test has time for what it does, whatever the machine. The output does not
 * depend on it. */
#ifndef JOB_H
#define JOB_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;

CUresult cuInit(unsigned flags);
CUresult cuDeviceGet(CUdevice *device, int ordinal);
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device);
CUresult cuCtxSetCurrent(CUcontext context);
CUresult cuCtxSynchronize(void);
CUresult cuModuleLoadData(CUmodule *module, const void *image);
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name);
CUresult cuModuleGetGlobal_v2(CUdeviceptr *address, size_t *bytes, CUmodule module, const char *name);
CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes);
CUresult cuMemFree_v2(CUdeviceptr address);
CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes);
CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes);
CUresult cuMemsetD32_v2(CUdeviceptr to, unsigned value, size_t count);
CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream stream, void **params,
                        void **extra);
CUresult cuStreamCreate(CUstream *stream, unsigned flags);
CUresult cuStreamSynchronize(CUstream stream);
CUresult cuEventCreate(CUevent *event, unsigned flags);
CUresult cuEventRecord(CUevent event, CUstream stream);
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags);
CUresult cuGetErrorName(CUresult error, const char **name);

#define STREAM_NON_BLOCKING 1

#define CHECK(call)                                                                                                    \
    do {                                                                                                               \
        CUresult error_ = (call);                                                                                      \
        if (error_ != 0) {                                                                                             \
            const char *name_ = "?";                                                                                   \
            cuGetErrorName(error_, &name_);                                                                            \
            fprintf(stderr, "%s:%d: %s: %s (%d)\n", __FILE__, __LINE__, #call, name_, error_);                         \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

/* Like CHECK, for calls that set errno. */
#define SYSTEM(call)                                                                                                   \
    do {                                                                                                               \
        if ((call) < 0) {                                                                                              \
            perror(#call);                                                                                             \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

/* mix(data, count, salt): data[i] = data[i] * 1664525 + (salt ^ i), which is added to the module's `total` too. */
static const char job_ptx[] =
    ".version 6.0\n"
    ".target sm_50\n"
    ".address_size 64\n"
    ".visible .global .align 4 .u32 total = 7;\n"
    ".visible .entry mix(.param .u64 p0, .param .u32 p1, .param .u32 p2)\n"
    "{\n"
    "    .reg .pred %p<2>;\n"
    "    .reg .b32 %r<16>;\n"
    "    .reg .b64 %rd<8>;\n"
    "    ld.param.u64 %rd1, [p0];\n"
    "    ld.param.u32 %r1, [p1];\n"
    "    ld.param.u32 %r2, [p2];\n"
    "    mov.u32 %r3, %ctaid.x;\n"
    "    mov.u32 %r4, %ntid.x;\n"
    "    mov.u32 %r5, %tid.x;\n"
    "    mad.lo.s32 %r6, %r3, %r4, %r5;\n"
    "    setp.ge.u32 %p1, %r6, %r1;\n"
    "    @%p1 bra DONE;\n"
    "    cvta.to.global.u64 %rd2, %rd1;\n"
    "    mul.wide.u32 %rd3, %r6, 4;\n"
    "    add.s64 %rd4, %rd2, %rd3;\n"
    "    ld.global.u32 %r7, [%rd4];\n"
    "    mul.lo.u32 %r8, %r7, 1664525;\n"
    "    xor.b32 %r9, %r2, %r6;\n"
    "    add.u32 %r10, %r8, %r9;\n"
    "    st.global.u32 [%rd4], %r10;\n"
    "    mov.u64 %rd5, total;\n"
    "    atom.global.add.u32 %r11, [%rd5], %r10;\n"
    "DONE:\n"
    "    ret;\n"
    "}\n";

struct job {
    unsigned steps;
    CUcontext context;
    CUmodule module;
    CUfunction mix;
};

/* What job_start was given, 0 before that. */
static unsigned job_steps;

/* Reads the arguments and makes the primary context of the first device current. */
static inline struct job job_start(int argc, char **argv) {
    struct job job = {.steps = argc == 2 ? (unsigned)atoi(argv[1]) : 0};
    CUdevice device;
    if (job.steps == 0) {
        fprintf(stderr, "usage: %s STEPS\n", argv[0]);
        exit(2);
    }
    job_steps = job.steps;
    CHECK(cuInit(0));
    CHECK(cuDeviceGet(&device, 0));
    CHECK(cuDevicePrimaryCtxRetain(&job.context, device));
    CHECK(cuCtxSetCurrent(job.context));
    CHECK(cuModuleLoadData(&job.module, job_ptx));
    CHECK(cuModuleGetFunction(&job.mix, job.module, "mix"));
    return job;
}

static inline CUdeviceptr job_alloc(unsigned count, unsigned value) {
    CUdeviceptr address;
    CHECK(cuMemAlloc_v2(&address, count * 4ul));
    CHECK(cuMemsetD32_v2(address, value, count));
    /* The streams that do not wait for the default stream find it done. */
    CHECK(cuStreamSynchronize(NULL));
    return address;
}

static inline void job_mix(const struct job *job, CUdeviceptr data, unsigned count, unsigned salt, CUstream stream) {
    void *params[] = {&data, &count, &salt};
    CHECK(cuLaunchKernel(job->mix, (count + 63) / 64, 1, 1, 64, 1, 1, 0, stream, params, NULL));
}

/* A hash of these words that begins with `sum`: FNV-1a by words. */
static inline uint64_t job_hash(uint64_t sum, const uint32_t *words, unsigned count) {
    for (unsigned i = 0; i < count; i++) {
        sum = (sum ^ words[i]) * 1099511628211ull;
    }
    return sum;
}

static inline int job_has_file(const char *name) { return access(name, F_OK) == 0; }

static inline void job_rest(void) {
    static unsigned rests;
    if (job_has_file("slow")) {
        rests++;
        usleep(job_steps != 0 && rests > job_steps / 2 ? 400000 : 40000);
    }
}

/* Stands still while the file `pause` is there, which the file `paused` says. */
static inline void job_pause_if_told(void) {
    if (!job_has_file("pause")) {
        return;
    }
    FILE *said = fopen("paused", "w");
    if (said == NULL || fclose(said) != 0) {
        perror("paused");
        exit(1);
    }
    while (job_has_file("pause")) {
        usleep(1000);
    }
}

static inline void job_line(unsigned step, uint64_t sum) {
    printf("step %u checksum %016llx\n", step, (unsigned long long)sum);
    fflush(stdout);
    job_rest();
}

#endif
