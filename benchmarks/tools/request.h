/* Reads what a proxy sends: whole HTTP/1 requests out of a buffer. */
#ifndef REQUEST_H
#define REQUEST_H

#include <stdbool.h>
#include <stddef.h>

struct request {
    const char *target; /* NULL: not HTTP */
    bool is_get, is_chunked, close_after;
    char *body; /* into the buffer; a chunked body is joined in place */
    size_t body_length, total_length;
};

/* The first request of the buffer; false when it is not complete. */
bool next_request(char *received, size_t length, struct request *request);

/* The number behind a JSON key, for instance "\"seed\"", without parsing the document. */
long number_after(const struct request *request, const char *key, long otherwise);

/* Characters of all message contents; of the whole body when it has no messages. */
size_t prompt_length(const struct request *request);

bool wants_stream(const struct request *request);

#endif
