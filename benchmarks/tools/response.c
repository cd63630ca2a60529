/* The reader of answers. It never looks back over bytes, so any split of them reads the same. */
#define _GNU_SOURCE
#include "response.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

void response_reset(struct response *response)
{
    size_t head = offsetof(struct response, head);
    size_t behind = head + sizeof response->head;
    /* Everything but the big buffer, which head_length bounds. */
    memset(response, 0, head);
    memset((char *)response + behind, 0, sizeof *response - behind);
}

/* ---- the body ---- */

static void end_line(struct response *response)
{
    if (response->line_length >= 7 && memcmp(response->line, "data: {", 7) == 0)
        response->events++;
    else if (response->line_length >= 12 && memcmp(response->line, "data: [DONE]", 12) == 0)
        response->done_seen = true;
    response->line_length = 0;
}

static void read_lines(struct response *response, const char *bytes, size_t length)
{
    const char *end = bytes + length;
    while (bytes < end) {
        const char *newline = memchr(bytes, '\n', (size_t)(end - bytes));
        const char *stop = newline ? newline : end;
        size_t room = sizeof response->line - response->line_length;
        size_t kept = (size_t)(stop - bytes) < room ? (size_t)(stop - bytes) : room;
        memcpy(response->line + response->line_length, bytes, kept);
        response->line_length += kept;
        if (newline)
            end_line(response);
        bytes = newline ? newline + 1 : end;
    }
}

static void compare_with_first(struct response *response, struct expectation *expected,
                               const char *bytes, size_t length)
{
    size_t at = response->body_length;
    if (at + length > sizeof expected->first)
        response->differs = true;
    else if (!expected->first_known)
        memcpy(expected->first + at, bytes, length);
    else if (at + length > expected->first_length || memcmp(expected->first + at, bytes, length))
        response->differs = true;
}

static void take_body(struct response *response, struct expectation *expected, const char *bytes,
                      size_t length)
{
    if (expected->stream)
        read_lines(response, bytes, length);
    else if (expected->same && response->status == 200)
        compare_with_first(response, expected, bytes, length);
    response->body_length += length;
}

static void complete(struct response *response, struct expectation *expected)
{
    response->complete = true;
    if (expected->stream || !expected->same || response->status != 200)
        return;
    if (!expected->first_known) {
        expected->first_known = true;
        expected->first_length = response->body_length;
    }
    response->differs |= response->body_length != expected->first_length;
}

/* ---- the head ---- */

static bool line_is(const char *line, const char *name)
{
    return strncasecmp(line, name, strlen(name)) == 0;
}

static bool value_has(const char *line, const char *word)
{
    const char *end = strstr(line, "\r\n");
    const char *at = strcasestr(line, word);
    return at && (!end || at < end);
}

static void read_head(struct response *response, struct expectation *expected)
{
    bool chunked = false;
    response->left = -1;
    response->status = atoi(response->head + sizeof "HTTP/1.1");
    for (char *line = response->head; (line = strstr(line, "\r\n"));) {
        line += 2;
        if (line_is(line, "content-length:"))
            response->left = atol(line + sizeof "content-length:" - 1);
        else if (line_is(line, "transfer-encoding:"))
            chunked = value_has(line, "chunked");
        else if (line_is(line, "connection:"))
            response->close_after = value_has(line, "close");
        else if (line_is(line, "x-calinix-cache-hit:"))
            response->cache_hit = value_has(line, "true");
    }
    response->until_close = !chunked && response->left < 0;
    response->reading = chunked ? READING_CHUNK_SIZE : READING_BODY;
    if (chunked)
        response->left = 0;
    else if (response->left == 0)
        complete(response, expected);
}

static size_t feed_head(struct response *response, struct expectation *expected, const char *bytes,
                        size_t length)
{
    size_t before = response->head_length;
    size_t room = sizeof response->head - 1 - before;
    size_t taken = length < room ? length : room;
    memcpy(response->head + before, bytes, taken);
    size_t known = before + taken;
    size_t from = before > 3 ? before - 3 : 0;
    char *blank = memmem(response->head + from, known - from, "\r\n\r\n", 4);
    if (!blank) {
        response->head_length = known;
        response->broken = taken == room;
        return taken;
    }
    *blank = 0;
    response->head_length = (size_t)(blank - response->head) + 4;
    read_head(response, expected);
    return response->head_length - before;
}

/* ---- framing ---- */

static size_t feed_body(struct response *response, struct expectation *expected, const char *bytes,
                        size_t length)
{
    size_t taken = length;
    if (!response->until_close && (size_t)response->left < length)
        taken = (size_t)response->left;
    take_body(response, expected, bytes, taken);
    if (response->until_close)
        return taken;
    response->left -= (long)taken;
    if (response->left)
        return taken;
    if (response->reading == READING_CHUNK)
        response->reading = READING_CHUNK_END;
    else
        complete(response, expected);
    return taken;
}

static void feed_size_character(struct response *response, char character)
{
    if (character == '\n') {
        response->broken = !response->size_seen;
        response->reading = response->left ? READING_CHUNK : READING_TRAILER;
        response->size_seen = false;
    } else if (character != '\r') {
        int digit = character <= '9' ? character - '0' : (character | 32) - 'a' + 10;
        response->broken = digit < 0 || digit > 15 || response->left >> 40;
        response->left = 16 * response->left + digit;
        response->size_seen = true;
    }
}

/* The bytes between chunks and after the last one. */
static void feed_between(struct response *response, struct expectation *expected, char character)
{
    if (response->reading == READING_CHUNK_SIZE) {
        feed_size_character(response, character);
    } else if (response->reading == READING_CHUNK_END) {
        if (character == '\n')
            response->reading = READING_CHUNK_SIZE;
        else
            response->broken = character != '\r';
    } else if (character == '\n') {
        if (response->trailer_column == 0)
            complete(response, expected);
        response->trailer_column = 0;
    } else if (character != '\r') {
        response->trailer_column++;
    }
}

size_t response_feed(struct response *response, struct expectation *expected, const char *bytes,
                     size_t length)
{
    size_t used = 0;
    while (used < length && !response->complete && !response->broken) {
        if (response->reading == READING_HEAD)
            used += feed_head(response, expected, bytes + used, length - used);
        else if (response->reading == READING_BODY || response->reading == READING_CHUNK)
            used += feed_body(response, expected, bytes + used, length - used);
        else
            feed_between(response, expected, bytes[used++]);
    }
    return used;
}

void response_closed(struct response *response)
{
    response->complete = response->until_close && response->reading == READING_BODY;
    response->broken = !response->complete;
}
