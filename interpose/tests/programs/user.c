// A library that uses the driver which it is linked against.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>

extern int cuInit(unsigned);

int use(void) { return cuInit(0); }

static int whose(void *found)
{
    Dl_info info;
    if (!found || !dladdr(found, &info))
        return 0;
    return strstr(info.dli_fname, "libckpt_interpose") ? 2 : 1;
}

// Whose function is found in this library's own scope, and behind it: 0 nobody's, 1 the driver's, 2 ours.
int in_scope(void) { return whose(dlsym(RTLD_DEFAULT, "cuInit")); }
int behind(void) { return whose(dlsym(RTLD_NEXT, "cuInit")); }
