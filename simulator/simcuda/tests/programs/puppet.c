// A program that makes the driver calls that its test sends.
//
// Usage: puppet LIBRARY FIFO LOG. Commands come line by line through the FIFO, which the program holds open at both
// ends, and each answer goes to the log: the command's first word and its result. Both survive CRIU. What a thread of
// the program says begins with "thread". A PID of 0 means the program itself. With PUPPET_SANDBOX in the environment,
// the kernel refuses the system calls that sandboxes tend to refuse.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SYS_memfd_secret
#define SYS_memfd_secret 447
#endif

typedef unsigned long long devptr;
struct pair { unsigned char old_uuid[16], new_uuid[16]; };
struct restore_args { struct pair *pairs; unsigned count; unsigned padding; void *custom; char reserved[40]; };

static int (*cuInit_)(unsigned);
static int (*cuCtxCreate_)(void **, unsigned, int);
static int (*cuCtxSetCurrent_)(void *);
static int (*cuMemAlloc_)(devptr *, size_t);
static int (*cuMemAllocManaged_)(devptr *, size_t, unsigned);
static int (*cuMemFree_)(devptr);
static int (*cuMemcpyHtoD_)(devptr, const void *, size_t);
static int (*cuMemcpyDtoH_)(void *, devptr, size_t);
static int (*cuStreamCreate_)(void **, unsigned);
static int (*cuStreamSynchronize_)(void *);
static int (*cuStreamBeginCapture_)(void *, int);
static int (*cuStreamEndCapture_)(void *, void **);
static int (*cuLaunchHostFunc_)(void *, void (*)(void *), void *);
static int (*cuDeviceGetUuid_)(unsigned char *, int);
static int (*cuGetState_)(int, unsigned *);
static int (*cuGetThread_)(int, int *);
static int (*cuLock_)(int, void *);
static int (*cuCheckpoint_)(int, void *);
static int (*cuRestore_)(int, void *);
static int (*cuUnlock_)(int, void *);

static int log_fd;
static void *context;
static void *stream;
static int release_flag;
static struct { devptr address; size_t size; } blocks[16];

static void say(const char *format, ...) {
    char line[256];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    line[length++] = '\n';
    if (write(log_fd, line, length) != length) _exit(9);
}

static void resolve(const char *path) {
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) { say("dlopen: %s", dlerror()); _exit(8); }
    struct { const char *name; void *pointer; } table[] = {
        {"cuInit", &cuInit_}, {"cuCtxCreate_v2", &cuCtxCreate_}, {"cuCtxSetCurrent", &cuCtxSetCurrent_},
        {"cuMemAlloc_v2", &cuMemAlloc_}, {"cuMemAllocManaged", &cuMemAllocManaged_}, {"cuMemFree_v2", &cuMemFree_},
        {"cuMemcpyHtoD_v2", &cuMemcpyHtoD_}, {"cuMemcpyDtoH_v2", &cuMemcpyDtoH_},
        {"cuStreamCreate", &cuStreamCreate_}, {"cuStreamSynchronize", &cuStreamSynchronize_},
        {"cuStreamBeginCapture_v2", &cuStreamBeginCapture_}, {"cuStreamEndCapture", &cuStreamEndCapture_},
        {"cuLaunchHostFunc", &cuLaunchHostFunc_}, {"cuDeviceGetUuid_v2", &cuDeviceGetUuid_},
        {"cuCheckpointProcessGetState", &cuGetState_}, {"cuCheckpointProcessGetRestoreThreadId", &cuGetThread_},
        {"cuCheckpointProcessLock", &cuLock_}, {"cuCheckpointProcessCheckpoint", &cuCheckpoint_},
        {"cuCheckpointProcessRestore", &cuRestore_}, {"cuCheckpointProcessUnlock", &cuUnlock_},
    };
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        void *symbol = dlsym(library, table[i].name);
        if (!symbol) { say("no %s", table[i].name); _exit(8); }
        memcpy(table[i].pointer, &symbol, sizeof symbol);
    }
}

// Bytes that depend on their place and on the seed.
static unsigned char *pattern(size_t size, unsigned seed) {
    unsigned char *bytes = malloc(size);
    uint32_t x = seed * 2654435761u + 1;
    for (size_t i = 0; i < size; i++) { x = x * 1664525u + 1013904223u; bytes[i] = x >> 24; }
    return bytes;
}

static int fill(int id, unsigned seed) {
    unsigned char *bytes = pattern(blocks[id].size, seed);
    int result = cuMemcpyHtoD_(blocks[id].address, bytes, blocks[id].size);
    free(bytes);
    return result;
}

static void check(int id, unsigned seed) {
    unsigned char *expected = pattern(blocks[id].size, seed), *found = malloc(blocks[id].size);
    int result = cuMemcpyDtoH_(found, blocks[id].address, blocks[id].size);
    say("check %d %s", result, memcmp(expected, found, blocks[id].size) ? "different" : "same");
    free(expected);
    free(found);
}

static void *allocate_in_thread(void *nothing) {
    (void)nothing;
    say("thread %ld starts", syscall(SYS_gettid));
    int result = cuCtxSetCurrent_(context);
    devptr address = 0;
    if (!result) result = cuMemAlloc_(&address, 4096);
    say("thread %ld ends %d", syscall(SYS_gettid), result);
    return NULL;
}

static void wait_for_release(void *nothing) {
    (void)nothing;
    while (!__atomic_load_n(&release_flag, __ATOMIC_ACQUIRE)) usleep(1000);
}

static void fork_child(void) {
    pid_t child = fork();
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        unsigned state;
        say("thread %d child %d %d", getpid(), cuInit_(0), cuGetState_(getpid(), &state));
        for (;;) pause();
    }
    say("fork %d", child);
}

static int restore(int pid, const char *map) {
    struct pair pairs[2];
    struct restore_args arguments = {.pairs = pairs, .count = 2};
    for (int i = 0; i < 2; i++) {
        int result = cuDeviceGetUuid_(pairs[i].old_uuid, i);
        if (result) return result;
        memcpy(pairs[i].new_uuid, pairs[i].old_uuid, 16);
    }
    if (!strcmp(map, "same")) return cuRestore_(pid, &arguments);
    if (!strcmp(map, "half")) arguments.count = 1;
    if (!strcmp(map, "none")) arguments.pairs = NULL;
    if (!strcmp(map, "strange")) pairs[1].new_uuid[5] ^= 1;
    if (!strcmp(map, "twice")) memcpy(pairs[1].new_uuid, pairs[0].new_uuid, 16);
    if (!strcmp(map, "reserved")) arguments.reserved[39] = 1;
    if (!strcmp(map, "custom")) arguments.custom = &arguments;
    if (!strcmp(map, "swapped")) {
        memcpy(pairs[0].new_uuid, pairs[1].old_uuid, 16);
        memcpy(pairs[1].new_uuid, pairs[0].old_uuid, 16);
    }
    return cuRestore_(pid, &arguments);
}

// Pairs as `xOLD:NEW,OLD:NEW`, in hexadecimal digits.
static int restore_pairs(int pid, const char *text) {
    struct pair pairs[4];
    struct restore_args arguments = {.pairs = pairs};
    unsigned char *byte = (unsigned char *)pairs;
    for (const char *at = text + 1; *at;) {
        if (*at == ':' || *at == ',') {
            at++;
            continue;
        }
        if (byte == (unsigned char *)(pairs + 4) || sscanf(at, "%2hhx", byte++) != 1) return -1;
        at += 2;
    }
    arguments.count = (byte - (unsigned char *)pairs) / sizeof *pairs;
    return cuRestore_(pid, &arguments);
}

static void print_uuid(int device) {
    unsigned char uuid[16] = {0};
    char text[33];
    int result = cuDeviceGetUuid_(uuid, device);
    for (int at = 0; at < 16; at++) sprintf(text + 2 * at, "%02x", uuid[at]);
    say("uuid %d %s", result, text);
}

static int squat(uintptr_t address) {
    void *page = mmap((void *)address, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    return page == (void *)address;
}

// Lets go, behind the driver's back, of the descriptors that CRIU refuses.
static int drop_descriptors(void) {
    int result = -1;
    for (int number = 3; number < 64; number++) {
        char path[64], link[128] = "";
        snprintf(path, sizeof path, "/proc/self/fd/%d", number);
        if (readlink(path, link, sizeof link - 1) < 0) continue;
        if (strstr(link, "userfaultfd") || strstr(link, "landlock-ruleset") || strstr(link, "secretmem")) result = close(number);
    }
    return result;
}

// The same with the mapping.
static int drop_mapping(void) {
    FILE *maps = fopen("/proc/self/maps", "re");
    char line[512];
    uintptr_t start = 0, end = 0;
    while (fgets(line, sizeof line, maps))
        if (strstr(line, "secretmem") || strstr(line, "socket:[")) sscanf(line, "%lx-%lx", &start, &end);
    fclose(maps);
    return start ? munmap((void *)start, end - start) : -1;
}

static void process_command(const char *word, long first, long second, long third, const char *text) {
    int pid = first ? first : getpid();

    if (!strcmp(word, "state")) {
        unsigned state = 99;
        int result = cuGetState_(pid, &state);
        say("state %d %u", result, state);
    } else if (!strcmp(word, "thread-id")) {
        int id = -1, result = cuGetThread_(pid, &id);
        say("thread-id %d %d", result, id);
    } else if (!strcmp(word, "lock")) {
        unsigned arguments[16] = {second, third};
        say("lock %d", cuLock_(pid, arguments));
    } else if (!strcmp(word, "lock-null")) {
        say("lock-null %d", cuLock_(pid, NULL));
    } else if (!strcmp(word, "checkpoint")) {
        uint64_t arguments[8] = {second, third};
        say("checkpoint %d", cuCheckpoint_(pid, second || third ? arguments : NULL));
    } else if (!strcmp(word, "restore")) {
        say("restore %d", cuRestore_(pid, NULL));
    } else if (!strcmp(word, "restore-map")) {
        say("restore-map %d", restore(pid, text));
    } else if (!strcmp(word, "restore-pairs")) {
        say("restore-pairs %d", restore_pairs(pid, text));
    } else if (!strcmp(word, "unlock")) {
        uint64_t arguments[8] = {second};
        say("unlock %d", cuUnlock_(pid, arguments));
    } else {
        say("unknown command %s", word);
    }
}

static void memory_command(const char *word, long first, long second, long third) {
    if (!strcmp(word, "init")) {
        int result = cuInit_(0);
        if (!result) result = cuCtxCreate_(&context, 0, 0);
        if (!result) result = cuStreamCreate_(&stream, 1);
        say("init %d", result);
    } else if (!strcmp(word, "init-only")) {
        say("init-only %d", cuInit_(0));
    } else if (!strcmp(word, "alloc")) {
        blocks[first].size = second;
        int result = cuMemAlloc_(&blocks[first].address, second);
        if (!result) result = fill(first, third);
        say("alloc %d %llx", result, blocks[first].address);
    } else if (!strcmp(word, "check")) {
        check(first, second);
    } else if (!strcmp(word, "free")) {
        say("free %d", cuMemFree_(blocks[first].address));
    } else if (!strcmp(word, "uuid")) {
        print_uuid(first);
    } else if (!strcmp(word, "managed")) {
        blocks[first].size = second;
        say("managed %d", cuMemAllocManaged_(&blocks[first].address, second, 1));
    } else if (!strcmp(word, "squat")) {
        say("squat %d", squat(blocks[first].address));
    } else if (!strcmp(word, "stall")) {
        __atomic_store_n(&release_flag, 0, __ATOMIC_RELEASE);
        say("stall %d", cuLaunchHostFunc_(stream, wait_for_release, NULL));
    } else if (!strcmp(word, "release")) {
        __atomic_store_n(&release_flag, 1, __ATOMIC_RELEASE);
        say("release 0");
    } else if (!strcmp(word, "synchronize")) {
        say("synchronize %d", cuStreamSynchronize_(stream));
    } else if (!strcmp(word, "capture")) {
        say("capture %d", cuStreamBeginCapture_(stream, 2));
    } else if (!strcmp(word, "end-capture")) {
        void *graph = NULL;
        say("end-capture %d", cuStreamEndCapture_(stream, &graph));
    } else if (!strcmp(word, "spawn")) {
        pthread_t thread;
        say("spawn %d", pthread_create(&thread, NULL, allocate_in_thread, NULL) || pthread_detach(thread));
    } else if (!strcmp(word, "drop-descriptors")) {
        say("drop-descriptors %d", drop_descriptors());
    } else if (!strcmp(word, "drop-mapping")) {
        say("drop-mapping %d", drop_mapping());
    } else if (!strcmp(word, "fork")) {
        fork_child();
    } else {
        say("unknown command %s", word);
    }
}

static int is_about_process(const char *word) {
    const char *words[] = {"state", "thread-id", "lock", "lock-null", "checkpoint", "restore", "restore-map", "restore-pairs", "unlock"};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (!strcmp(word, words[i])) return 1;
    return 0;
}

static int enter_sandbox(void) {
    struct sock_filter program[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_userfaultfd, 3, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_memfd_secret, 2, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
    };
    struct sock_fprog filter = {.len = sizeof program / sizeof *program, .filter = program};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter, 0, 0);
}

int main(int argc, char **argv) {
    if (argc != 4) return 2;
    // What else the test's own caller left open is not ours to keep, least of all across CRIU.
    syscall(SYS_close_range, 3, ~0u, 0);
    if (getenv("PUPPET_SANDBOX") && enter_sandbox()) return 4;
    log_fd = open(argv[3], O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    FILE *commands = fdopen(open(argv[2], O_RDWR | O_CLOEXEC), "r");
    if (log_fd < 0 || !commands) return 3;
    resolve(argv[1]);
    say("ready %d", getpid());
    char line[512], word[32], text[320];
    while (fgets(line, sizeof line, commands)) {
        long first = 0, second = 0, third = 0;
        text[0] = 0;
        if (sscanf(line, "%31s %ld %ld %ld", word, &first, &second, &third) < 3) sscanf(line, "%*s %*s %319s", text);
        if (!strcmp(word, "exit")) return 0;
        if (is_about_process(word)) process_command(word, first, second, third, text);
        else memory_command(word, first, second, third);
    }
    return 1;
}
