/* Chat requests: messages that a group shares (the first is the system's), then ones of their own. */
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

static const char *const WIDE_WORDS[] = {
    "\u4e00\u6b21 ", "\u9577\u3044 ", "\u043f\u0440\u043e\u043c\u043f\u0442 ",
    "\u03bc\u03ad\u03c3\u03b1 ", "\uac8c\uc774\ud2b8 ", "se\u00f1al ", "gr\u00fc\u00dft ",
    "\u0939\u093e\u0901 ", "\u05e9\u05dc\u05d5\u05dd ", "\u0645\u0631\u062d\u0628\u0627 ", "\U0001f680 ",
    "\u7b54\u3048\u3002", "na\u00efve ", "\u0434\u043e\u043c ", "\u00e9t\u00e9 ", "\U0001f40d ",
};
enum { WIDE_COUNT = sizeof WIDE_WORDS / sizeof *WIDE_WORDS };

static const char COUNTER[] = "00000000";

static char *write_words(char *to, size_t length, unsigned seed, int wide)
{
    char *end = to + length;
    while (to < end) {
        seed = seed * 1664525u + 1013904223u;
        const char *word = wide ? WIDE_WORDS[(seed >> 16) % WIDE_COUNT]
                                : WORDS[(seed >> 16) % WORD_COUNT];
        size_t room = (size_t)(end - to), word_length = strlen(word);
        if (word_length <= room)
            to = mempcpy(to, word, word_length);
        else if (wide) /* half a character is no UTF-8 */
            to = memset(to, ' ', room) + room;
        else
            to = mempcpy(to, word, room);
    }
    return to;
}

/* `count` messages, together `length` characters; `left` more follow them. The first one begins with
 * the counter where there is a place to tell of it. */
static char *write_messages(char *to, const struct prompt_options *options, int count,
                            size_t length, int left, unsigned seed, char **counter)
{
    for (int i = 0; i < count; i++) {
        const char *role = (count - 1 - i + left) % 2 ? "assistant" : "user";
        size_t part = length * (size_t)(i + 1) / (size_t)count - length * (size_t)i / (size_t)count;
        to += sprintf(to, "{\"role\":\"%s\",\"content\":\"", left && i == 0 ? "system" : role);
        if (counter && i == 0) {
            size_t counted = sizeof COUNTER; /* the digits and a space */
            *counter = to;
            to = stpcpy(stpcpy(to, COUNTER), " ");
            part = part > counted ? part - counted : 0;
        }
        to = write_words(to, part, seed + (unsigned)i, options->wide);
        to = stpcpy(to, i == count - 1 && !left ? "\"}" : "\"},");
    }
    return to;
}

static char *write_body(char *to, const struct prompt_options *options, int group, int index,
                        char **counter)
{
    size_t shared = options->prompt_bytes * (size_t)options->shared_percent / 100;
    int shared_turns = options->turns * options->shared_percent / 100;
    if (!shared)
        shared_turns = 0;
    else if (shared_turns < 1)
        shared_turns = 1;
    /* Where nothing is shared, there is no system's message either. */
    int own_turns = options->turns - (shared_turns ? shared_turns : 1);
    if (own_turns < 1)
        own_turns = 1;
    to += sprintf(to, "{\"model\":\"%s\",\"messages\":[", options->model);
    to = write_messages(to, options, shared_turns, shared, own_turns,
                        7919u * (unsigned)group + 1, NULL);
    to = write_messages(to, options, own_turns, options->prompt_bytes - shared, 0,
                        104729u * (unsigned)index + 77, counter);
    return to + sprintf(to, "],\"max_tokens\":%d,\"seed\":%ld,\"temperature\":0.7%s}",
                        options->max_tokens, options->gap_us,
                        options->stream ? ",\"stream\":true" : "");
}

struct prompt prompt_make(const struct prompt_options *options, int group, int index)
{
    struct prompt prompt;
    char *counter;
    size_t room = options->prompt_bytes + strlen(options->model) + strlen(options->path) + 1024 +
                  (size_t)(options->turns + 2) * 64;
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
