/* HTTP/1 requests as proxies write them: with a Content-Length, or chunked. */
#define _GNU_SOURCE
#include "request.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

static bool header_is(const char *line, const char *name)
{
    return strncasecmp(line, name, strlen(name)) == 0;
}

static size_t read_head(const char *head, size_t head_length, struct request *request)
{
    const char *end = head + head_length - 2; /* the empty line */
    const char *line = memmem(head, head_length, "\r\n", 2);
    size_t content_length = 0;
    request->is_get = head[0] == 'G';
    request->target = memchr(head, ' ', head_length);
    request->close_after = line >= head + 8 && memcmp(line - 8, "HTTP/1.0", 8) == 0;
    for (line += 2; line < end;) {
        size_t left = head_length - (size_t)(line - head);
        const char *next = (const char *)memmem(line, left, "\r\n", 2) + 2;
        size_t length = (size_t)(next - line);
        if (header_is(line, "content-length:"))
            content_length = strtoul(line + 15, NULL, 10);
        else if (header_is(line, "transfer-encoding:"))
            request->is_chunked = memmem(line, length, "chunked", 7) != NULL;
        else if (header_is(line, "connection:"))
            request->close_after = memmem(line, length, "close", 5) != NULL;
        line = next;
    }
    return content_length;
}

/* Joins the chunks in place; the whole length of the coded body, or 0 when it is not yet complete.
 * A first pass only measures, as an incomplete body must stay as it came. */
static size_t unchunk(char *body, size_t available, size_t *joined_length)
{
    for (int pass = 0; pass < 2; pass++) {
        char *from = body, *to = body, *end = body + available;
        for (;;) {
            char *line_end = memmem(from, (size_t)(end - from), "\r\n", 2);
            if (!line_end)
                return 0;
            size_t size = strtoul(from, NULL, 16);
            from = line_end + 2;
            if ((size_t)(end - from) < size + 2)
                return 0;
            if (pass == 1)
                memmove(to, from, size);
            to += size;
            from += size + 2;
            if (size == 0 && pass == 1) {
                *joined_length = (size_t)(to - body);
                return (size_t)(from - body);
            }
            if (size == 0)
                break;
        }
    }
    return 0;
}

bool next_request(char *received, size_t length, struct request *request)
{
    char *blank = memmem(received, length, "\r\n\r\n", 4);
    if (!blank)
        return false;
    memset(request, 0, sizeof *request);
    size_t head_length = (size_t)(blank + 4 - received);
    size_t content_length = read_head(received, head_length, request);
    size_t available = length - head_length;
    request->body = received + head_length;
    if (request->is_chunked) {
        size_t coded = unchunk(request->body, available, &request->body_length);
        request->total_length = head_length + coded;
        return coded > 0;
    }
    request->body_length = content_length;
    request->total_length = head_length + content_length;
    return available >= content_length;
}

long number_after(const struct request *request, const char *key, long otherwise)
{
    const char *end = request->body + request->body_length;
    const char *at = memmem(request->body, request->body_length, key, strlen(key));
    if (!at)
        return otherwise;
    at += strlen(key);
    while (at < end && (*at == ' ' || *at == ':'))
        at++;
    return at < end && *at >= '0' && *at <= '9' ? strtol(at, NULL, 10) : otherwise;
}

size_t prompt_length(const struct request *request)
{
    static const char KEY[] = "\"content\":\"";
    const char *at = request->body, *end = request->body + request->body_length;
    size_t length = 0;
    while ((at = memmem(at, (size_t)(end - at), KEY, sizeof KEY - 1))) {
        at += sizeof KEY - 1;
        const char *quote = memchr(at, '"', (size_t)(end - at));
        if (!quote) /* not JSON, or cut off */
            break;
        length += (size_t)(quote - at);
        at = quote;
    }
    return length ? length : request->body_length;
}

bool wants_stream(const struct request *request)
{
    return memmem(request->body, request->body_length, "\"stream\":true", 13) ||
           memmem(request->body, request->body_length, "\"stream\": true", 14);
}
