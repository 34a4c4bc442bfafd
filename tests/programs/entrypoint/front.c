/*
 * Starts its arguments as a child and ends as that does, as an init for containers would (without its signals).
 * tests/tests/entrypoint.rs builds it statically, and dynamically under the name of such an init.
 */
#include <sys/wait.h>
#include <unistd.h>

int main(int argc, char **argv) {
    int status;
    pid_t child;

    if (argc < 2)
        return 2;
    child = fork();
    if (child < 0)
        return 3;
    if (child == 0) {
        execvp(argv[1], argv + 1);
        _exit(127);
    }
    while (waitpid(child, &status, 0) < 0)
        ;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}
