// Linked against the driver. Initialises it and waits for the end of its input.
// usage: direct [fork]
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

extern int cuInit(unsigned), cuDeviceGetCount(int *), cuCtxCreate_v2(void **, unsigned, int);

int main(int count, char **arguments)
{
    void *context;
    int devices;
    Dl_info info;
    if (cuInit(0) || cuCtxCreate_v2(&context, 0, 0) || !dladdr((void *)cuDeviceGetCount, &info))
        return 1;
    printf("direct: %s\n", strstr(info.dli_fname, "libckpt_interpose") ? "ours" : info.dli_fname);
    fflush(stdout);
    if (count > 1 && !strcmp(arguments[1], "fork") && fork() == 0) {
        // The driver does not work here, as without us.
        if (cuDeviceGetCount(&devices) != 3)
            abort();
        puts("child");
        fflush(stdout);
        for (;;)
            pause();
    }
    while (getchar() != EOF)
        ;
    return cuDeviceGetCount(&devices) ? 2 : 0;
}
