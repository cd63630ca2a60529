/* Chat requests of English words: a system message that a group shares, then a user's own text. */
#define _GNU_SOURCE
#include "prompts.h"

#include <string.h>

#include "common.h"

static const char *const WORDS[] = {
    "a ",      "long ",   "prompt ",  "goes ",    "through ", "the ",    "gateway ",
    "and ",    "lands ",  "where ",   "its ",     "prefix ",  "waits ",  "already ",
    "pods ",   "answer ", "tokens ",  "quickly ", "when ",    "caches ", "are ",
    "warm ",   "queues ", "stay ",    "short ",   "so ",      "nobody ", "recomputes ",
    "blocks ", "twice ",  "tonight ", "again ",
};
enum { WORD_COUNT = sizeof WORDS / sizeof *WORDS };

static const char COUNTER[] = "00000000";

static char *write_words(char *to, size_t length, unsigned seed)
{
    char *end = to + length;
    while (to < end) {
        seed = seed * 1664525u + 1013904223u;
        const char *word = WORDS[(seed >> 16) % WORD_COUNT];
        size_t word_length = strlen(word);
        if (word_length > (size_t)(end - to))
            word_length = (size_t)(end - to);
        to = mempcpy(to, word, word_length);
    }
    return to;
}

static char *write_body(char *to, const struct prompt_options *options, int group, int index,
                        char **counter)
{
    size_t shared = options->prompt_bytes * (size_t)options->shared_percent / 100;
    size_t own = options->prompt_bytes - shared;
    size_t counted = sizeof COUNTER; /* the digits and a space */
    to += sprintf(to, "{\"model\":\"%s\",\"messages\":[", options->model);
    if (shared) {
        to = stpcpy(to, "{\"role\":\"system\",\"content\":\"");
        to = write_words(to, shared, 7919u * (unsigned)group + 1);
        to = stpcpy(to, "\"},");
    }
    to = stpcpy(to, "{\"role\":\"user\",\"content\":\"");
    *counter = to;
    to = stpcpy(stpcpy(to, COUNTER), " ");
    to = write_words(to, own > counted ? own - counted : 0, 104729u * (unsigned)index + 77);
    return to + sprintf(to, "\"}],\"max_tokens\":%d,\"seed\":%ld,\"temperature\":0.7%s}",
                        options->max_tokens, options->gap_us,
                        options->stream ? ",\"stream\":true" : "");
}

struct prompt prompt_make(const struct prompt_options *options, int group, int index)
{
    struct prompt prompt;
    char *counter;
    size_t room = options->prompt_bytes + strlen(options->model) + strlen(options->path) + 1024;
    char *body = must_allocate(malloc(room));
    size_t body_length = (size_t)(write_body(body, options, group, index, &counter) - body);
    prompt.bytes = must_allocate(malloc(room + 1024));
    int head_length = sprintf(prompt.bytes,
                              "POST %s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nUser-Agent: loadgen/1\r\n"
                              "Accept: */*\r\nAuthorization: Bearer sk-test\r\n"
                              "Content-Type: application/json\r\nContent-Length: %zu\r\n\r\n",
                              options->path, options->port, body_length);
    memcpy(prompt.bytes + head_length, body, body_length);
    prompt.length = (size_t)head_length + body_length;
    prompt.counter = prompt.bytes + head_length + (counter - body);
    free(body);
    return prompt;
}

struct prompt prompt_get(const struct prompt_options *options)
{
    struct prompt prompt = {0};
    size_t room = strlen(options->path) + 256;
    prompt.bytes = must_allocate(malloc(room));
    prompt.length = (size_t)snprintf(prompt.bytes, room,
                                     "GET %s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n"
                                     "User-Agent: loadgen/1\r\nAccept: */*\r\n\r\n",
                                     options->path, options->port);
    return prompt;
}

void prompt_number(const struct prompt *prompt, unsigned number)
{
    if (!prompt->counter)
        return;
    for (int digit = 7; digit >= 0; digit--, number >>= 4)
        prompt->counter[digit] = "0123456789abcdef"[number & 15];
}
