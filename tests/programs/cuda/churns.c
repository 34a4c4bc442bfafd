/* Allocates, writes, reads and frees device memory all the time, of many sizes, directly and in the order of streams: what it
 * has at one moment is elsewhere than a moment before.
 *
 *   churns STEPS */
#include "job.h"

CUresult cuMemAllocAsync(CUdeviceptr *address, size_t bytes, CUstream stream);
CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream);

enum { PIECES = 300, CHANGES = 8, SMALL_BYTES = 5000, LARGE_BYTES = 3 << 20, LARGE_EACH = 10, STREAMS = 3 };

struct piece {
    CUdeviceptr address;
    unsigned bytes;
    int is_async;
};

static uint64_t state = 88172645463325252u;

static unsigned chance(unsigned below) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (unsigned)(state >> 11) % below;
}

int main(int argc, char **argv) {
    static struct piece pieces[PIECES];
    static uint32_t words[LARGE_BYTES / 4];
    struct job job = job_start(argc, argv);
    CUstream streams[STREAMS];
    for (int i = 0; i < STREAMS; i++) {
        CHECK(cuStreamCreate(&streams[i], i == 0 ? 0 : STREAM_NON_BLOCKING));
    }
    uint64_t hash = 0;
    for (unsigned step = 1; step <= job.steps; step++) {
        for (int change = 0; change < CHANGES; change++) {
            unsigned number = chance(PIECES);
            struct piece *piece = &pieces[number];
            CUstream stream = streams[number % STREAMS];
            if (piece->bytes == 0) {
                piece->bytes = 4 * (1 + chance(chance(LARGE_EACH) == 0 ? LARGE_BYTES / 4 : SMALL_BYTES / 4));
                piece->is_async = (int)chance(2);
                if (piece->is_async) {
                    CHECK(cuMemAllocAsync(&piece->address, piece->bytes, stream));
                    CHECK(cuStreamSynchronize(stream));
                } else {
                    CHECK(cuMemAlloc_v2(&piece->address, piece->bytes));
                }
                for (unsigned i = 0; i < piece->bytes / 4; i++) {
                    words[i] = step * 7 + i;
                }
                CHECK(cuMemcpyHtoD_v2(piece->address, words, piece->bytes));
                continue;
            }
            CHECK(cuMemcpyDtoH_v2(words, piece->address, piece->bytes));
            hash = job_hash(hash, words, piece->bytes / 4);
            CHECK(piece->is_async ? cuMemFreeAsync(piece->address, stream) : cuMemFree_v2(piece->address));
            piece->bytes = 0;
        }
        job_line(step, hash);
    }
    return 0;
}
