// Calls each entry point of the driver in a thread of its own when told so, and tells which of them waited.
// usage: matrix (linked against fake_driver.c); commands on standard input: call, end
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef int function(long, long, long, long, long, long, long, long, long, long, long, long, long, long);

extern __thread int mine;
extern unsigned calls[];

#define ROW(name) extern function name;
#include "symbols.h"
#undef ROW

static const struct {
    const char *name;
    function *function;
} rows[] = {
#define ROW(name) {#name, name},
#include "symbols.h"
#undef ROW
};

enum { ROWS = sizeof rows / sizeof *rows };

enum { WAITS, CALLS, IS_DONE };

static struct thread {
    int index, tid, state;
    pthread_t id;
} threads[ROWS];
static int starts[2];

static int call(int index)
{
    return rows[index].function(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
}

static void *run(void *argument)
{
    struct thread *thread = argument;
    char byte;
    __atomic_store_n(&thread->tid, (int)syscall(SYS_gettid), __ATOMIC_SEQ_CST);
    if (read(starts[0], &byte, 1) != 1)
        abort();
    mine = 1;
    __atomic_store_n(&thread->state, CALLS, __ATOMIC_SEQ_CST);
    call(thread->index);
    __atomic_store_n(&thread->state, IS_DONE, __ATOMIC_SEQ_CST);
    return NULL;
}

static int sleeps_in_futex(int tid)
{
    char path[64], text[64] = "";
    snprintf(path, sizeof path, "/proc/self/task/%d/syscall", tid);
    int file = open(path, O_RDONLY);
    ssize_t got = file < 0 ? -1 : read(file, text, sizeof text - 1);
    if (file >= 0)
        close(file);
    return got > 0 && atoi(text) == SYS_futex;
}

// Whether every thread is through or sleeps in the middle of its call.
static int is_settled(void)
{
    for (int index = 0; index < ROWS; index++) {
        int state = __atomic_load_n(&threads[index].state, __ATOMIC_SEQ_CST);
        if (state == WAITS || (state == CALLS && !sleeps_in_futex(threads[index].tid)))
            return 0;
    }
    return 1;
}

static void expect(const char *command)
{
    char line[16];
    if (!fgets(line, sizeof line, stdin) || strncmp(line, command, strlen(command)))
        abort();
}

int main(void)
{
    // The first call of each looks the driver's function up, which takes locks. Symbols without a signature mark the
    // process by being called; those the test leaves out here by their place behind all others.
    mine = 1;
    for (int index = 0; index < TYPED; index++)
        call(index);
    mine = 0;
    for (int index = 0; index < ROWS; index++)
        calls[index] = 0;
    if (pipe(starts))
        abort();
    pthread_attr_t small;
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, 128 * 1024);
    for (int index = 0; index < ROWS; index++) {
        threads[index].index = index;
        if (pthread_create(&threads[index].id, &small, run, &threads[index]))
            abort();
    }
    puts("ready");
    fflush(stdout);
    expect("call");
    for (int index = 0; index < ROWS; index++)
        if (write(starts[1], "", 1) != 1)
            abort();
    // A thread may be on its way through a lock of the C library's, but not for so long.
    for (int settled = 0; settled < 10; usleep(5000))
        settled = is_settled() ? settled + 1 : 0;
    for (int index = 0; index < ROWS; index++)
        printf("%s %s %u\n", threads[index].state == IS_DONE ? "passed" : "parked", rows[index].name,
               __atomic_load_n(&calls[index], __ATOMIC_SEQ_CST));
    puts("settled");
    fflush(stdout);
    expect("end");
    for (int index = 0; index < ROWS; index++)
        pthread_join(threads[index].id, NULL);
    for (int index = 0; index < ROWS; index++)
        printf("called %s %u\n", rows[index].name, calls[index]);
    return 0;
}
