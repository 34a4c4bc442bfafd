// Looks the driver's functions up in every way, and tells whose function came back.
// usage: routes DRIVER; standard input: lines of NAME VERSION FLAGS for cuGetProcAddress, or of SYMBOL -1 0 for dlsym
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int proc_address(const char *, void **, int, unsigned long long);
typedef int proc_address_v2(const char *, void **, int, unsigned long long, int *);

int marker(void) { return 1; }

static void tell(const char *route, void *found)
{
    Dl_info info = {0};
    if (!found || !dladdr(found, &info) || !info.dli_fname) {
        printf("%s: none\n", route);
        return;
    }
    const char *slash = strrchr(info.dli_fname, '/');
    printf("%s: %s %s\n", route, slash ? slash + 1 : info.dli_fname, info.dli_sname ? info.dli_sname : "?");
}

static void tell_scopes(const char *when)
{
    static const char *names[] = {"cuInit", "cuMemAlloc_v2", "cuLaunchKernel_ptsz", "cuNoSuchFunction", "marker",
                                  "malloc", "no_such_function"};
    char route[128];
    for (unsigned i = 0; i < sizeof names / sizeof *names; i++) {
        snprintf(route, sizeof route, "%s default %s", when, names[i]);
        tell(route, dlsym(RTLD_DEFAULT, names[i]));
        snprintf(route, sizeof route, "%s next %s", when, names[i]);
        tell(route, dlsym(RTLD_NEXT, names[i]));
    }
    tell("dlvsym next malloc", dlvsym(RTLD_NEXT, "malloc", "GLIBC_2.2.5"));
    tell("dlvsym wrong version", dlvsym(RTLD_NEXT, "malloc", "GLIBC_9.9"));
}

int main(int count, char **arguments)
{
    if (count != 2)
        abort();
    tell_scopes("unloaded");
    void *driver = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
    if (!driver) {
        puts(dlerror());
        return 1;
    }
    tell_scopes("local");
    tell("handle", dlsym(driver, "cuInit"));
    tell("handle of none", dlsym(driver, "cuNoSuchFunction"));
    tell("handle, version", dlvsym(driver, "cuInit", "ANY"));
    void *program = dlopen(NULL, RTLD_NOW);
    tell("program marker", dlsym(program, "marker"));
    proc_address *v1 = (proc_address *)dlsym(driver, "cuGetProcAddress");
    proc_address_v2 *v2 = (proc_address_v2 *)dlsym(driver, "cuGetProcAddress_v2");
    char name[128], route[256];
    int version, status;
    unsigned long long flags;
    while (scanf("%127s %d %llu", name, &version, &flags) == 3) {
        if (version < 0) {
            snprintf(route, sizeof route, "symbol %s", name);
            tell(route, dlsym(driver, name));
            continue;
        }
        void *found = NULL;
        int result = v1(name, &found, version, flags);
        snprintf(route, sizeof route, "v1 %s %d %llu = %d", name, version, flags, result);
        tell(route, result ? NULL : found);
        found = NULL;
        status = -1;
        result = v2(name, &found, version, flags, &status);
        snprintf(route, sizeof route, "v2 %s %d %llu = %d, %d", name, version, flags, result, status);
        tell(route, result ? NULL : found);
        found = NULL;
        result = v2(name, &found, version, flags, NULL);
        snprintf(route, sizeof route, "v2 without status %s %d %llu = %d", name, version, flags, result);
        tell(route, result ? NULL : found);
    }
    dlopen(arguments[1], RTLD_NOW | RTLD_GLOBAL);
    tell_scopes("global");
    return 0;
}
