/* How the harness talks to a program that runs: it puts a file `ask` with one word into the program's working directory;
 * the program takes it away, does what it says and puts a file `answer` there. No file stays open meanwhile, so that a
 * checkpoint finds nothing of it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Whether something was asked; the word is in `word` then. */
static int asked(char *word, size_t size) {
    if (access("ask", F_OK) != 0) {
        return 0;
    }
    FILE *file = fopen("ask", "r");
    int is_there = file != NULL && fgets(word, (int)size, file) != NULL;
    if (file != NULL) {
        fclose(file);
    }
    if (is_there) {
        word[strcspn(word, "\n")] = 0;
        is_there = unlink("ask") == 0;
    }
    return is_there;
}

static void answer(const char *text) {
    FILE *file = fopen("answer.part", "w");
    if (file == NULL || fputs(text, file) < 0 || fclose(file) != 0 || rename("answer.part", "answer") != 0) {
        perror("answer");
        exit(1);
    }
}
