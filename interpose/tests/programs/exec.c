// Becomes, or starts, /bin/sleep with an environment of its own making.
// usage: exec HOW
#define _GNU_SOURCE
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define PROGRAM "/bin/sleep"

int main(int count, char **arguments)
{
    char *argv[] = {"sleep", "1000", NULL}, *envp[] = {"ONLY=1", NULL};
    if (count != 2)
        return 1;
    const char *how = arguments[1];
    pid_t child = 0;
    if (!strcmp(how, "execve"))
        execve(PROGRAM, argv, envp);
    if (!strcmp(how, "execvpe"))
        execvpe("sleep", argv, envp);
    if (!strcmp(how, "execle"))
        execle(PROGRAM, "sleep", "0", "0", "0", "0", "0", "0", "1000", NULL, envp);
    if (!strcmp(how, "fexecve"))
        fexecve(open(PROGRAM, O_RDONLY | O_CLOEXEC), argv, envp);
    if (!strcmp(how, "execveat"))
        execveat(AT_FDCWD, PROGRAM, argv, envp, 0);
    if (!strcmp(how, "vfork") && !(child = vfork())) {
        execve(PROGRAM, argv, envp);
        _exit(4);
    }
    if (!strcmp(how, "posix_spawn") && posix_spawn(&child, PROGRAM, NULL, NULL, argv, envp))
        return 2;
    if (!strcmp(how, "posix_spawnp") && posix_spawnp(&child, "sleep", NULL, NULL, argv, envp))
        return 2;
    if (child)
        return waitpid(child, NULL, 0) < 0;
    clearenv();
    setenv("ONLY", "1", 1);
    if (!strcmp(how, "execv"))
        execv(PROGRAM, argv);
    if (!strcmp(how, "execvp"))
        execvp("sleep", argv);
    if (!strcmp(how, "execl"))
        execl(PROGRAM, "sleep", "0", "0", "0", "0", "0", "0", "1000", NULL);
    if (!strcmp(how, "execlp"))
        execlp("sleep", "sleep", "1000", NULL);
    // The wrapped functions fail as the others do, and come back in order.
    if (!strcmp(how, "fails")) {
        int failed = execl("/nonexistent", "a", "b", "c", "d", "e", "f", "g", NULL) == -1
            && execle("/nonexistent", "a", "b", "c", "d", "e", "f", NULL, envp) == -1
            && execlp("/nonexistent", "a", NULL) == -1 && execv("/nonexistent", argv) == -1;
        perror("exec");
        return failed ? 5 : 6;
    }
    return 3;
}
