/* Prefill and decode apart: what the mock pods say and check of it. */
#ifndef HANDOFF_H
#define HANDOFF_H

#include <stdbool.h>

#include "request.h"

/* How KV gets from a prefill pod to a decode pod; UNIFIED: one pod does both. */
enum handoff { UNIFIED, NIXL, SGLANG };

/* What came so far. Of n requests that are handed on as they should be, NIXL sees n prefills and n
 * handles, SGLANG n meetings and nothing else. */
struct handed {
    long prefills, handles, meetings;
};

/* Counts one request of NIXL; whether it is a prefill leg, which is answered with a handle. */
bool take_nixl_leg(const struct request *request, struct handed *handed);

/* SGLang's legs wait for each other: the one that came to the request's room before, or NULL, and
 * then `leg` is kept for the other one. `roomless`: the request names no room. */
void *meet_in_room(const struct request *request, void *leg, bool *roomless);

/* vLLM's handle for so many tokens, as the member that closes a JSON answer; static memory. */
const char *handle_for(size_t tokens);

#endif
