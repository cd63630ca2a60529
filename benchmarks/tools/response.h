/* Reads one HTTP/1 answer at a time from the bytes of a connection, and checks what is in it. */
#ifndef RESPONSE_H
#define RESPONSE_H

#include <stdbool.h>
#include <stddef.h>

enum reading {
    READING_HEAD,
    READING_BODY, /* by length, or up to the end of the connection */
    READING_CHUNK_SIZE,
    READING_CHUNK,
    READING_CHUNK_END,
    READING_TRAILER,
};

struct response {
    enum reading reading;
    char head[8192];
    size_t head_length;
    int status;
    bool until_close, close_after, cache_hit, complete, broken;
    long left;            /* bytes of the body or chunk still to come */
    bool size_seen;       /* the chunk's size line has had a digit */
    size_t trailer_column;
    size_t body_length;
    long events;          /* SSE events with a JSON object in them */
    bool done_seen;       /* "data: [DONE]" */
    bool differs;         /* not the body that the first answer had */
    char line[16];        /* the start of the SSE line being read */
    size_t line_length;
};

/* How bodies are judged. */
struct expectation {
    bool stream; /* bodies are SSE */
    bool same;   /* whole answers must be equal to the first one */
    char first[65536];
    size_t first_length;
    bool first_known;
};

/* Ready for the next answer. */
void response_reset(struct response *response);

/* Takes bytes up to the end of the answer; how many of them it used. Look at complete and broken
 * afterwards. */
size_t response_feed(struct response *response, struct expectation *expected, const char *bytes,
                     size_t length);

/* The connection was closed: completes an answer that ends so. */
void response_closed(struct response *response);

#endif
