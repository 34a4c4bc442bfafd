/* Does with virtual memory whatever can be done, at random: pieces are created, retained, released, mapped partly, at
 * several addresses and nowhere. Each result, each handle's properties and each byte's pattern is compared with what
 * is known here. */
#include "vmm.h"

enum { PIECES = 6, LARGEST = 3, SLOTS = 16, ACTIONS = 12, INVALID_VALUE = 1, READ_WRITE = 3 };

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address);
CUresult cuMemGetAllocationPropertiesFromHandle(struct allocation_prop *prop, CUmemGenericAllocationHandle handle);
CUresult cuMemGetAccess(unsigned long long *flags, const struct location *location, CUdeviceptr address);
CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle, int type,
                                      unsigned long long flags);

/* Physical memory: it is there while it has references or mappings. */
static struct piece {
    CUmemGenericAllocationHandle handle;
    unsigned references, mappings, granules;
    uint32_t words[LARGEST];
} pieces[PIECES];

/* What is mapped at an address: for the first slot of a mapping, its length. */
static struct slot {
    struct piece *piece;
    unsigned granule, length;
    int access;
} slots[SLOTS];

static size_t granule_bytes;
static CUdeviceptr base;
static uint64_t seed = 88172645463325252ull, sum;

static unsigned below(unsigned bound) {
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return (unsigned)(seed >> 33) % bound;
}

static CUdeviceptr address_of(unsigned slot) { return base + slot * granule_bytes; }

static void expect(const char *call, long got, long wanted) {
    if (got != wanted) {
        fprintf(stderr, "%s: %ld instead of %ld\n", call, got, wanted);
        exit(1);
    }
    sum = (sum ^ (uint64_t)got) * 1099511628211ull;
}

#define EXPECT(call, wanted) expect(#call, (long)(call), (long)(wanted))

static unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }

static int is_free(unsigned slot, unsigned length) {
    for (unsigned i = slot; i < slot + length; i++) {
        if (slots[i].piece) {
            return 0;
        }
    }
    return 1;
}

/* Whether these slots are whole mappings without gaps. */
static int is_whole(unsigned slot, unsigned length) {
    unsigned at = slot;
    while (at < slot + length && slots[at].piece && slots[at].granule == 0) {
        at += slots[at].length;
    }
    return at == slot + length;
}

static void fill(unsigned slot, uint32_t word) {
    CHECK(cuMemsetD32_v2(address_of(slot), word, granule_bytes / 4));
    /* Unmapping does not wait for it. */
    CHECK(cuCtxSynchronize());
    slots[slot].piece->words[slots[slot].granule] = word;
}

static CUresult map(struct piece *piece, unsigned slot, unsigned length) {
    CUresult result = cuMemMap(address_of(slot), length * granule_bytes, 0, piece->handle, 0);
    if (result == 0) {
        for (unsigned i = 0; i < length; i++) {
            slots[slot + i] = (struct slot){.piece = piece, .granule = i, .length = length};
        }
        piece->mappings++;
    }
    return result;
}

static CUresult set_access(unsigned slot, unsigned length, int flags) {
    struct access access = {.location = {.type = 1}, .flags = flags};
    CUresult result = cuMemSetAccess(address_of(slot), length * granule_bytes, &access, 1);
    for (unsigned i = slot; result == 0 && i < slot + length; i++) {
        slots[i].access = flags;
    }
    return result;
}

static CUresult unmap(unsigned slot, unsigned length) {
    CUresult result = cuMemUnmap(address_of(slot), length * granule_bytes);
    for (unsigned i = slot; result == 0 && i < slot + length; i++) {
        slots[i].piece->mappings -= slots[i].granule == 0;
        slots[i] = (struct slot){0};
    }
    return result;
}

/* A piece that is no more is created again, with content in all of it. */
static void create(struct piece *piece) {
    static const CUdeviceptr scratch = SLOTS - LARGEST;
    *piece = (struct piece){.references = 1, .granules = 1 + below(LARGEST)};
    CHECK(cuMemCreate(&piece->handle, piece->granules * granule_bytes, &vmm_prop, 0));
    CHECK(map(piece, scratch, piece->granules));
    CHECK(set_access(scratch, piece->granules, READ_WRITE));
    for (unsigned i = 0; i < piece->granules; i++) {
        fill(scratch + i, below(1u << 31));
    }
    CHECK(unmap(scratch, piece->granules));
}

/* A handle without references is not used: NVIDIA's driver does not check it. */
static void act(void) {
    struct piece *piece = &pieces[below(PIECES)];
    unsigned slot = below(SLOTS - LARGEST), length = min(1 + below(LARGEST), SLOTS - LARGEST - slot);
    if (piece->references == 0 && piece->mappings == 0) {
        create(piece);
        return;
    }
    switch (below(8)) {
    case 0:
        if (piece->references > 0) {
            CHECK(cuMemRelease(piece->handle));
            piece->references--;
        }
        break;
    case 1: {
        CUmemGenericAllocationHandle handle;
        void *inside = (void *)(address_of(slot) + below(granule_bytes));
        EXPECT(cuMemRetainAllocationHandle(&handle, inside), slots[slot].piece ? 0 : INVALID_VALUE);
        if (slots[slot].piece) {
            EXPECT(handle == slots[slot].piece->handle, 1);
            slots[slot].piece->references++;
        }
        break;
    }
    case 2:
    case 3: {
        int is_right = length <= piece->granules && is_free(slot, length);
        if (piece->references > 0) {
            EXPECT(map(piece, slot, length) == 0, is_right);
        }
        break;
    }
    case 4: {
        /* Where nothing is mapped, drivers differ. */
        if (!is_free(slot, length)) {
            EXPECT(unmap(slot, length) == 0, is_whole(slot, length));
        }
        break;
    }
    case 5: {
        int is_right = is_whole(slot, length);
        EXPECT(set_access(slot, length, below(4) ? READ_WRITE : 0), is_right ? 0 : INVALID_VALUE);
        break;
    }
    case 6:
        if (slots[slot].access == READ_WRITE) {
            fill(slot, below(1u << 31));
        }
        break;
    default: {
        struct allocation_prop prop;
        int descriptor;
        if (piece->references == 0) {
            break;
        }
        CHECK(cuMemGetAllocationPropertiesFromHandle(&prop, piece->handle));
        EXPECT(prop.handle_types, 0);
        EXPECT(prop.location.id, 0);
        /* It was not created for that. */
        EXPECT(cuMemExportToShareableHandle(&descriptor, piece->handle, 1, 0), INVALID_VALUE);
    }
    }
}

/* Everything that can be read is what was written, wherever it is mapped. */
static void look(void) {
    for (unsigned slot = 0; slot < SLOTS; slot++) {
        const struct location device = {.type = 1};
        unsigned long long flags;
        if (!slots[slot].piece) {
            EXPECT(cuMemGetAccess(&flags, &device, address_of(slot)), INVALID_VALUE);
            continue;
        }
        CHECK(cuMemGetAccess(&flags, &device, address_of(slot)));
        EXPECT(flags, slots[slot].access);
        if (slots[slot].access == READ_WRITE) {
            uint32_t first, last;
            CHECK(cuMemcpyDtoH_v2(&first, address_of(slot), 4));
            CHECK(cuMemcpyDtoH_v2(&last, address_of(slot + 1) - 4, 4));
            EXPECT(first, slots[slot].piece->words[slots[slot].granule]);
            EXPECT(last, slots[slot].piece->words[slots[slot].granule]);
        }
    }
}

int main(int argc, char **argv) {
    struct job job = job_start(argc, argv);
    CUmemGenericAllocationHandle handle;
    struct access access = {.location = {.type = 1}, .flags = READ_WRITE};
    CUdeviceptr plain = job_alloc(1 << 20, 7), small = job_alloc(64, 7);
    uint32_t word;
    granule_bytes = vmm_granularity_bytes();
    CHECK(cuMemAddressReserve(&base, SLOTS * granule_bytes, 0, 0, 0));
    for (unsigned step = 1; step <= job.steps; step++) {
        for (unsigned i = 0; i < ACTIONS; i++) {
            act();
        }
        look();
        /* What cuMemAlloc gives is nobody's to map, and stays. */
        EXPECT(cuMemRetainAllocationHandle(&handle, (void *)plain), INVALID_VALUE);
        EXPECT(cuMemRetainAllocationHandle(&handle, (void *)small), INVALID_VALUE);
        EXPECT(cuMemUnmap(plain & -granule_bytes, granule_bytes), INVALID_VALUE);
        EXPECT(cuMemSetAccess(plain & -granule_bytes, granule_bytes, &access, 1), INVALID_VALUE);
        CHECK(cuMemcpyDtoH_v2(&word, plain, 4));
        EXPECT(word, 7);
        job_line(step, sum);
    }
    return 0;
}
