/* A CUDA program in the style of older code: it links the driver API directly, makes thousands of small, short-lived
 * allocations, and keeps all state in device memory and in global variables.
 * It plays a random game of growth: cells of different sizes are born, mixed with their neighbours by a kernel, and
 * die. Every REPORT rounds it prints a checksum of all living cells.
 *
 *   cc -O2 legacy-job.c -lcuda -o legacy-job && ./legacy-job [ROUNDS [CELLS [REST_MS]]]
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Only the declarations that are needed, so that no toolkit has to be installed. */
typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef struct CUstream_st *CUstream;
CUresult cuInit(unsigned flags);
CUresult cuDeviceGet(CUdevice *device, int ordinal);
CUresult cuCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice device);
CUresult cuCtxDestroy_v2(CUcontext context);
CUresult cuModuleLoadData(CUmodule *module, const void *image);
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name);
CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes);
CUresult cuMemFree_v2(CUdeviceptr address);
CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes);
CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes);
CUresult cuMemsetD32_v2(CUdeviceptr to, unsigned value, size_t count);
CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream stream, void **params,
                        void **extra);
CUresult cuCtxSynchronize(void);
CUresult cuGetErrorName(CUresult error, const char **name);

#define REPORT 10
#define CHECK(call)                                                                                                    \
    do {                                                                                                               \
        CUresult error_ = (call);                                                                                      \
        if (error_ != 0) {                                                                                             \
            const char *name_ = "?";                                                                                   \
            cuGetErrorName(error_, &name_);                                                                            \
            fprintf(stderr, "legacy-job: %s: %s (%d)\n", #call, name_, error_);                                        \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

/* mix(cell, neighbour, count, neighbour_count, salt):
 *   cell[i] = cell[i] * 1664525 + neighbour[i % neighbour_count] + (salt ^ i) */
static const char ptx[] =
    ".version 6.0\n"
    ".target sm_50\n"
    ".address_size 64\n"
    ".visible .entry mix(.param .u64 p0, .param .u64 p1, .param .u32 p2, .param .u32 p3, .param .u32 p4)\n"
    "{\n"
    "    .reg .pred %p<2>;\n"
    "    .reg .b32 %r<16>;\n"
    "    .reg .b64 %rd<9>;\n"
    "    ld.param.u64 %rd1, [p0];\n"
    "    ld.param.u64 %rd2, [p1];\n"
    "    ld.param.u32 %r1, [p2];\n"
    "    ld.param.u32 %r2, [p3];\n"
    "    ld.param.u32 %r3, [p4];\n"
    "    mov.u32 %r4, %ctaid.x;\n"
    "    mov.u32 %r5, %ntid.x;\n"
    "    mov.u32 %r6, %tid.x;\n"
    "    mad.lo.s32 %r7, %r4, %r5, %r6;\n"
    "    setp.ge.u32 %p1, %r7, %r1;\n"
    "    @%p1 bra DONE;\n"
    "    cvta.to.global.u64 %rd3, %rd1;\n"
    "    cvta.to.global.u64 %rd4, %rd2;\n"
    "    mul.wide.u32 %rd5, %r7, 4;\n"
    "    add.s64 %rd6, %rd3, %rd5;\n"
    "    rem.u32 %r8, %r7, %r2;\n"
    "    mul.wide.u32 %rd7, %r8, 4;\n"
    "    add.s64 %rd8, %rd4, %rd7;\n"
    "    ld.global.u32 %r9, [%rd6];\n"
    "    ld.global.u32 %r10, [%rd8];\n"
    "    mul.lo.u32 %r11, %r9, 1664525;\n"
    "    add.u32 %r12, %r11, %r10;\n"
    "    xor.b32 %r13, %r3, %r7;\n"
    "    add.u32 %r14, %r12, %r13;\n"
    "    st.global.u32 [%rd6], %r14;\n"
    "DONE:\n"
    "    ret;\n"
    "}\n";

struct cell {
    CUdeviceptr address;
    unsigned count; /* of 32-bit words */
};

static struct cell *cells;
static unsigned cell_count;
static uint32_t *host;
static uint64_t random_state = 88172645463325252ull;

static uint64_t next_random(void) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

/* Most cells have a few hundred bytes, some have tens of kilobytes. */
static void give_birth(struct cell *cell) {
    unsigned scale = (unsigned)(next_random() % 12);
    cell->count = 1 + (unsigned)(next_random() % (4u << scale));
    CHECK(cuMemAlloc_v2(&cell->address, cell->count * 4ul));
    if (next_random() % 2) {
        CHECK(cuMemsetD32_v2(cell->address, (unsigned)next_random(), cell->count));
    } else {
        for (unsigned i = 0; i < cell->count; i++) {
            host[i] = (uint32_t)next_random();
        }
        CHECK(cuMemcpyHtoD_v2(cell->address, host, cell->count * 4ul));
    }
}

static uint64_t checksum(void) {
    uint64_t sum = 14695981039346656037ull;
    for (unsigned i = 0; i < cell_count; i++) {
        CHECK(cuMemcpyDtoH_v2(host, cells[i].address, cells[i].count * 4ul));
        for (unsigned j = 0; j < cells[i].count; j++) {
            sum = (sum ^ host[j]) * 1099511628211ull;
        }
    }
    return sum;
}

int main(int argc, char **argv) {
    unsigned rounds = argc > 1 ? (unsigned)atoi(argv[1]) : 100;
    cell_count = argc > 2 ? (unsigned)atoi(argv[2]) : 2000;
    useconds_t rest_us = argc > 3 ? (useconds_t)atoi(argv[3]) * 1000 : 0;
    CUdevice device;
    CUcontext context;
    CUmodule module;
    CUfunction mix;
    if (rounds == 0 || cell_count == 0) {
        fprintf(stderr, "usage: legacy-job [ROUNDS [CELLS [REST_MS]]]\n");
        return 2;
    }
    CHECK(cuInit(0));
    CHECK(cuDeviceGet(&device, 0));
    CHECK(cuCtxCreate_v2(&context, 0, device));
    CHECK(cuModuleLoadData(&module, ptx));
    CHECK(cuModuleGetFunction(&mix, module, "mix"));
    cells = calloc(cell_count, sizeof *cells);
    host = malloc(4ul * (4u << 12));
    if (cells == NULL || host == NULL) {
        perror("legacy-job");
        return 1;
    }
    for (unsigned i = 0; i < cell_count; i++) {
        give_birth(&cells[i]);
    }
    for (unsigned round = 1; round <= rounds; round++) {
        for (unsigned n = 0; n < cell_count / 10 + 1; n++) {
            struct cell *cell = &cells[next_random() % cell_count];
            struct cell *neighbour = &cells[next_random() % cell_count];
            unsigned salt = (unsigned)next_random();
            void *params[] = {&cell->address, &neighbour->address, &cell->count, &neighbour->count, &salt};
            if (cell != neighbour) {
                CHECK(cuLaunchKernel(mix, (cell->count + 127) / 128, 1, 1, 128, 1, 1, 0, NULL, params, NULL));
            }
        }
        for (unsigned n = 0; n < cell_count / 50 + 1; n++) {
            struct cell *cell = &cells[next_random() % cell_count];
            CHECK(cuMemFree_v2(cell->address));
            give_birth(cell);
        }
        if (round % REPORT == 0 || round == rounds) {
            printf("round %u checksum %016llx\n", round, (unsigned long long)checksum());
            fflush(stdout);
        }
        usleep(rest_us);
    }
    CHECK(cuCtxSynchronize());
    for (unsigned i = 0; i < cell_count; i++) {
        CHECK(cuMemFree_v2(cells[i].address));
    }
    CHECK(cuCtxDestroy_v2(context));
    return 0;
}
