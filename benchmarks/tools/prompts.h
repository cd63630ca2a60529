/* The requests that are sent, made once before the measurement. */
#ifndef PROMPTS_H
#define PROMPTS_H

#include <stddef.h>

enum { TEMPLATES = 64, GROUPS = 8 };

struct prompt {
    char *bytes; /* the whole request, head and body */
    size_t length;
    char *counter; /* eight hexadecimal digits that make each request's prompt a new one */
};

struct prompt_options {
    const char *path, *model;
    int port;
    size_t prompt_bytes; /* of all messages' contents together */
    int shared_percent;  /* how much of a prompt all of its group begin with */
    int turns;           /* messages of a prompt; at least one of them is new */
    int wide;            /* words of many scripts, in UTF-8, instead of English ones */
    int max_tokens;
    long gap_us;
    int stream;
};

/* The prompts of one group begin alike; `index` gives each its own text. */
struct prompt prompt_make(const struct prompt_options *options, int group, int index);

/* GET path. */
struct prompt prompt_get(const struct prompt_options *options);

/* Writes `number` into the prompt. */
void prompt_number(const struct prompt *prompt, unsigned number);

#endif
