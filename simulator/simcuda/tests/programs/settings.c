// A program that makes the driver calls that its arguments say, one after the other.
//
// Usage: settings LIBRARY COMMAND... A command is NAME or NAME:NUMBER. After each one its line goes to standard
// output: the name, the call's result, and any value it returned. The program ends with 0, whatever the results were.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef unsigned long long devptr;

static void *library;
static void *context;
static void *stream;
static devptr last;

// The function of a symbol, for calls that are made in one place only.
#define CALL(symbol, ...) ((int (*)())resolve(symbol))(__VA_ARGS__)

static void *resolve(const char *symbol) {
    void *found = dlsym(library, symbol);
    if (!found) {
        printf("no %s\n", symbol);
        exit(8);
    }
    return found;
}

static double now_s(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}

// A kernel that never ends, with the PTX version in tenths.
static int load(unsigned long version, void **module) {
    char text[256];
    snprintf(text, sizeof text,
             ".version %lu.%lu\n.target sm_80\n.address_size 64\n.visible .entry endless() {\nagain:\n bra again;\n}\n",
             version / 10, version % 10);
    return CALL("cuModuleLoadData", module, text);
}

static int launch(void) {
    void *module, *function;
    int result = load(80, &module);
    if (!result) result = CALL("cuModuleGetFunction", &function, module, "endless");
    void *none = NULL;
    typedef int launch_t(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
                         void **);
    if (!result) result = ((launch_t *)resolve("cuLaunchKernel"))(function, 1, 1, 1, 1, 1, 1, 0, none, NULL, NULL);
    return result;
}

// Copies from and to the device; how long it took, in microseconds.
static int copy(size_t size, long *time_us) {
    char *host = calloc(1, size);
    devptr device = 0;
    int result = CALL("cuMemAlloc_v2", &device, size);
    double start = now_s();
    if (!result) result = CALL("cuMemcpyHtoD_v2", device, host, size);
    if (!result) result = CALL("cuMemcpyDtoH_v2", host, device, size);
    *time_us = (now_s() - start) * 1e6;
    free(host);
    return result;
}

static int is(const char *command, const char *name) {
    size_t length = strlen(name);
    return !strncmp(command, name, length) && (!command[length] || command[length] == ':');
}

static void perform(const char *command) {
    const char *colon = strchr(command, ':');
    unsigned long number = colon ? strtoul(colon + 1, NULL, 0) : 0;
    int result = -1, value = 0;
    long value_out = -1;
    double start = now_s();
    if (is(command, "init")) result = CALL("cuInit", 0);
    else if (is(command, "version")) { result = CALL("cuDriverGetVersion", &value); value_out = value; }
    else if (is(command, "count")) { value = -1; result = CALL("cuDeviceGetCount", &value); value_out = value; }
    else if (is(command, "device")) result = CALL("cuDeviceGet", &value, (int)number);
    else if (is(command, "context")) result = CALL("cuCtxCreate_v2", &context, 0, (int)number);
    else if (is(command, "destroy")) result = CALL("cuCtxDestroy_v2", context);
    else if (is(command, "primary")) result = CALL("cuDevicePrimaryCtxRetain", &context, 0);
    else if (is(command, "release")) result = CALL("cuDevicePrimaryCtxRelease_v2", 0);
    else if (is(command, "alloc")) result = CALL("cuMemAlloc_v2", &last, (size_t)number);
    else if (is(command, "free")) result = CALL("cuMemFree_v2", last);
    else if (is(command, "free-bytes")) {
        size_t free_bytes = 0, total = 0;
        result = CALL("cuMemGetInfo_v2", &free_bytes, &total);
        value_out = free_bytes;
    }
    else if (is(command, "synchronize")) result = CALL("cuCtxSynchronize");
    else if (is(command, "stream")) result = CALL("cuStreamCreate", &stream, 1);
    else if (is(command, "copy")) result = copy(number, &value_out);
    else if (is(command, "load")) { void *module; result = load(number, &module); }
    else if (is(command, "launch")) result = launch();
    else if (is(command, "array")) { void *array; result = CALL("cuArrayCreate_v2", &array, NULL); }
    else if (is(command, "old-call") || is(command, "new-call")) {
        // Whether it is available to a program of this CUDA version. One came with 3.2, the other one with 12.9.
        void *address = NULL;
        const char *name = is(command, "old-call") ? "cuMemAlloc" : "cuLogsRegisterCallback";
        result = CALL("cuGetProcAddress_v2", name, &address, (int)number, (uint64_t)0, &value);
        value_out = address != NULL;
    }
    else if (is(command, "timed-device")) {
        result = CALL("cuDeviceGet", &value, 0);
        value_out = (now_s() - start) * 1e6;
    }
    else if (is(command, "touch")) result = *(volatile char *)(uintptr_t)last;
    else if (is(command, "fork")) {
        fflush(stdout);
        pid_t child = fork();
        if (!child) return;
        int status = 0;
        waitpid(child, &status, 0);
        printf("parent %d\n", status);
        result = CALL("cuCtxSynchronize");
    }
    else if (is(command, "pause")) {
        printf("pause\n");
        fflush(stdout);
        // Until the other end of the pipe closes.
        value = getchar();
        return;
    }
    printf("%.*s %d", (int)strcspn(command, ":"), command, result);
    if (value_out >= 0) printf(" %ld", value_out);
    printf("\n");
    fflush(stdout);
}

int main(int count, char **arguments) {
    library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        printf("dlopen: %s\n", dlerror());
        return 8;
    }
    for (int i = 2; i < count; i++) perform(arguments[i]);
    return 0;
}
