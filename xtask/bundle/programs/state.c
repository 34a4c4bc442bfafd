/* state BYTES PIECES [REST_US]: a job whose state is so much device memory in so many allocations. Each step writes one
 * of them anew. What each block of 1 MiB has to hold is known at all times, so that the job can check all of it.
 *
 * It is asked (see ask.h) for:
 *   gap        the longest time between two steps since it was asked before, in seconds: how long it stood still
 *   steps      how many steps it has done, and how long it has run since it was asked before
 *   check      "ok", or where the memory does not hold what it should
 *   addresses  a checksum of the addresses of its memory
 */
#include "ask.h"
#include "cuda.h"

#define BLOCK_BYTES (1ul << 20)

static unsigned long long *pieces;
static unsigned *generations; /* how often each was written */
static size_t count, piece_bytes;
static void *stream;

static size_t block_bytes(size_t at) {
    return piece_bytes - at < BLOCK_BYTES ? piece_bytes - at : BLOCK_BYTES;
}

static unsigned value_of(size_t piece, size_t at) {
    unsigned value = (unsigned)piece * 2654435761u ^ (unsigned)(at / BLOCK_BYTES) * 40503u;
    return value ^ generations[piece] * 2246822519u;
}

static void write_piece(size_t piece) {
    generations[piece]++;
    for (size_t at = 0; at < piece_bytes; at += BLOCK_BYTES) {
        CHECK(cuMemsetD32Async(pieces[piece] + at, value_of(piece, at), block_bytes(at) / 4, stream));
    }
    CHECK(cuStreamSynchronize(stream));
}

/* The first and the last words of each block. */
static void check(char *text, size_t size) {
    for (size_t piece = 0; piece < count; piece++) {
        for (size_t at = 0; at < piece_bytes; at += BLOCK_BYTES) {
            unsigned ends[2], expected = value_of(piece, at);
            CHECK(cuMemcpyDtoH_v2(&ends[0], pieces[piece] + at, 4));
            CHECK(cuMemcpyDtoH_v2(&ends[1], pieces[piece] + at + block_bytes(at) - 4, 4));
            if (ends[0] != expected || ends[1] != expected) {
                snprintf(text, size, "piece %zu, byte %zu: %08x and %08x, should be %08x", piece, at, ends[0], ends[1],
                         expected);
                return;
            }
        }
    }
    snprintf(text, size, "ok");
}

static void sum_addresses(char *text, size_t size) {
    unsigned long long sum = 14695981039346656037ull;
    for (size_t piece = 0; piece < count; piece++) {
        sum = (sum ^ pieces[piece]) * 1099511628211ull;
    }
    snprintf(text, size, "%016llx", sum);
}

int main(int argc, char **argv) {
    if (argc < 3) {
        fprintf(stderr, "usage: state BYTES PIECES [REST_US]\n");
        return 2;
    }
    count = strtoull(argv[2], NULL, 10);
    piece_bytes = count == 0 ? 0 : strtoull(argv[1], NULL, 10) / count / 4 * 4;
    useconds_t rest_us = argc > 3 ? (useconds_t)atoi(argv[3]) : 0;
    pieces = calloc(count, sizeof *pieces);
    generations = calloc(count, sizeof *generations);
    if (piece_bytes == 0 || pieces == NULL || generations == NULL) {
        fprintf(stderr, "state: nothing to allocate, or no memory for it\n");
        return 2;
    }
    void *context;
    CHECK(cuInit(0));
    CHECK(cuCtxCreate_v2(&context, 0, 0));
    CHECK(cuStreamCreate(&stream, 1));
    for (size_t piece = 0; piece < count; piece++) {
        CHECK(cuMemAlloc_v2(&pieces[piece], piece_bytes));
        write_piece(piece);
    }
    double last_s = now_s(), gap_s = 0, since_s = last_s;
    unsigned long steps = 0;
    for (size_t piece = 0;; piece = (piece + 1) % count) {
        char word[64], text[256];
        write_piece(piece);
        steps++;
        usleep(rest_us);
        double at_s = now_s();
        gap_s = at_s - last_s > gap_s ? at_s - last_s : gap_s;
        last_s = at_s;
        if (!asked(word, sizeof word)) {
            continue;
        }
        if (strcmp(word, "gap") == 0) {
            snprintf(text, sizeof text, "%.6f", gap_s);
        } else if (strcmp(word, "steps") == 0) {
            snprintf(text, sizeof text, "%lu %.6f", steps, at_s - since_s);
            steps = 0;
        } else if (strcmp(word, "check") == 0) {
            check(text, sizeof text);
        } else if (strcmp(word, "addresses") == 0) {
            sum_addresses(text, sizeof text);
        } else {
            snprintf(text, sizeof text, "unknown word %s", word);
        }
        answer(text);
        gap_s = 0;
        last_s = now_s();
        if (strcmp(word, "steps") == 0) {
            since_s = last_s;
        }
    }
}
