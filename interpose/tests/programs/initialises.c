// Initialises the driver and waits for the end of its input.
#include <stdio.h>

int cuInit(unsigned);

int main(void)
{
    if (cuInit(0))
        return 1;
    puts("ready");
    fflush(stdout);
    while (getchar() != EOF)
        ;
    return 0;
}
