# cython: boundscheck=False, wraparound=False, initializedcheck=False
"""The usual form of a usage object, read without a JSON decoder; usage.py says what is meant."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE

cdef extern from *:
    """
    #include <string.h>

    enum { PROMPT, COMPLETION, INPUT, OUTPUT, READ, CREATED, CACHED, DETAILS, COUNTS = 7 };
    enum { NONE = -1, MOST_DIGITS = 8, DEPTH = 2 };

    struct calinix_name { const char *text; unsigned char length, field; };

    static const struct calinix_name calinix_names[] = {
        {"prompt_tokens", 13, PROMPT},
        {"completion_tokens", 17, COMPLETION},
        {"prompt_tokens_details", 21, DETAILS},
        {"cached_tokens", 13, CACHED},
        {"input_tokens", 12, INPUT},
        {"output_tokens", 13, OUTPUT},
        {"input_tokens_details", 20, DETAILS + 1},
        {"cache_read_input_tokens", 23, READ},
        {"cache_creation_input_tokens", 27, CREATED},
    };

    static int calinix_field(const char *text, Py_ssize_t length) {
        for (size_t i = 0; i < sizeof calinix_names / sizeof *calinix_names; i++)
            if (calinix_names[i].length == length && !memcmp(calinix_names[i].text, text, length))
                return calinix_names[i].field;
        return -1;
    }

    /* Reads the object whose brace is before `at` into `counts`; details go to further counts of
       their own. Returns what follows it, NULL where it is of no usual form. */
    static const char *calinix_counts(const char *at, const char *end, int depth, int *counts) {
        if (at < end && *at == '}') return at + 1;
        for (;;) {
            if (at >= end || *at++ != '"') return NULL;
            const char *name = at;
            for (; at < end && *at != '"'; at++)
                if (*at == '\\\\' || (signed char)*at < ' ') return NULL; /* also not ASCII */
            if (at >= end) return NULL;
            int field = calinix_field(name, at - name);
            int is_details = field == DETAILS || field == DETAILS + 1;
            if (++at >= end || *at++ != ':') return NULL;
            while (at < end && *at == ' ') at++;
            int value = NONE;
            if (end - at >= 4 && !memcmp(at, "null", 4)) {
                at += 4;
                if (depth == 0 && is_details) counts[COUNTS + 2 * (field - DETAILS)] = NONE;
            } else if (at < end && *at == '{') {
                int inner[COUNTS + 4];
                inner[CACHED] = NONE;
                if (depth + 1 >= DEPTH || (field >= 0 && !(depth == 0 && is_details))) return NULL;
                at = calinix_counts(at + 1, end, depth + 1, inner);
                if (!at) return NULL;
                if (is_details) {
                    counts[COUNTS + 2 * (field - DETAILS)] = 1;
                    counts[COUNTS + 2 * (field - DETAILS) + 1] = inner[CACHED];
                }
            } else {
                const char *first = at;
                value = 0;
                while (at < end && *at >= '0' && *at <= '9') {
                    if (at - first == MOST_DIGITS) return NULL;
                    value = value * 10 + (*at++ - '0');
                }
                if (at == first || (*first == '0' && at - first > 1)) return NULL;
                if (is_details) return NULL;
            }
            if (field >= 0 && field < COUNTS) counts[field] = value;
            if (at >= end) return NULL;
            if (*at == '}') return at + 1;
            if (*at++ != ',') return NULL;
            while (at < end && *at == ' ') at++;
        }
    }

    /* The last "usage" in the text: what follows its name, NULL where there is none. */
    static const char *calinix_last_usage(const char *text, Py_ssize_t size) {
        for (const char *at = text + size - 7; at >= text; at--)
            if (*at == '"' && !memcmp(at, "\\"usage\\"", 7)) return at + 7;
        return NULL;
    }

    static int calinix_usage(const char *text, Py_ssize_t size, int *prompt, int *output,
                             int *cached) {
        int counts[COUNTS + 4];
        const char *end = text + size, *at = calinix_last_usage(text, size);
        if (!at) return 0;
        for (int i = 0; i < COUNTS + 4; i++) counts[i] = NONE;
        if (at >= end || *at++ != ':') return -1;
        while (at < end && *at == ' ') at++;
        if (at >= end || *at++ != '{') return -1;
        if (!calinix_counts(at, end, 0, counts)) return -1;
        *prompt = counts[PROMPT];
        if (*prompt == NONE && counts[INPUT] != NONE)
            *prompt = counts[INPUT] + (counts[READ] == NONE ? 0 : counts[READ])
                + (counts[CREATED] == NONE ? 0 : counts[CREATED]);
        *output = counts[COMPLETION] == NONE ? counts[OUTPUT] : counts[COMPLETION];
        *cached = counts[COUNTS] != NONE ? counts[COUNTS + 1]
            : counts[COUNTS + 2] != NONE ? counts[COUNTS + 3] : counts[READ];
        return *prompt == NONE && *output == NONE ? -1 : 1;
    }
    """
    int calinix_usage(const char *text, Py_ssize_t size, int *prompt, int *output, int *cached)


def usual_counts(bytes tail):
    cdef int prompt = -1, output = -1, cached = -1
    cdef int found = calinix_usage(
        PyBytes_AS_STRING(tail), PyBytes_GET_SIZE(tail), &prompt, &output, &cached
    )
    if found < 0:
        return None
    return (
        None if prompt < 0 else prompt,
        None if output < 0 else output,
        None if cached < 0 else cached,
    )
