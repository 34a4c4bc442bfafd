// Another preloaded library, which wraps a call of the driver.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int marker(void) { return 2; }

int cuInit(unsigned flags)
{
    static int depth;
    if (depth++)
        abort();
    int (*next)(unsigned) = (int (*)(unsigned))dlsym(RTLD_NEXT, "cuInit");
    int (*next_marker)(void) = (int (*)(void))dlsym(RTLD_NEXT, "marker");
    Dl_info info;
    if (!next || !dladdr((void *)next, &info))
        abort();
    printf("wrapper: next is %s, marker %s\n", strstr(info.dli_fname, "libckpt_interpose") ? "ours" : info.dli_fname,
           next_marker ? "there" : "none");
    return next(flags);
}
