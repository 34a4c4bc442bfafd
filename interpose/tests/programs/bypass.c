// Uses the driver past whatever is preloaded, or only loads it.
// usage: bypass load|use deepbind|dlmopen LIBRARY; then waits for the end of its input
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

int main(int count, char **arguments)
{
    if (count != 4)
        return 1;
    int is_deep = !strcmp(arguments[2], "deepbind");
    void *library = is_deep ? dlopen(arguments[3], RTLD_NOW | RTLD_DEEPBIND)
                            : dlmopen(LM_ID_NEWLM, arguments[3], RTLD_NOW);
    int (*use)(void) = library ? (int (*)(void))dlsym(library, "use") : NULL;
    if (!use) {
        fputs(dlerror(), stderr);
        return 2;
    }
    if (!strcmp(arguments[1], "use") && use())
        return 3;
    puts("ready");
    fflush(stdout);
    while (getchar() != EOF)
        ;
    return 0;
}
