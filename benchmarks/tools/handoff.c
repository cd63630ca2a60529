/* Handles in the shape of vLLM's NIXL connector, and SGLang's rooms. */
#define _GNU_SOURCE
#include "handoff.h"

#include <stdio.h>
#include <string.h>

enum { BLOCK_TOKENS = 16, MAX_BLOCKS = 8192, BLOCK_CHARACTERS = 5, MAX_WAITING = 4096 };

static const char ENGINE[] = "1fd9e394-4f7e-4217-adbe-5a64a6dd6180";
static const char HEAD[] =
    ",\"kv_transfer_params\":{\"do_remote_prefill\":true,\"do_remote_decode\":false,"
    "\"remote_block_ids\":[[";
static const char TAIL[] =
    "]],\"remote_engine_id\":\"%s\",\"remote_request_id\":\"chatcmpl-00112233-0\","
    "\"remote_host\":\"127.0.0.1\",\"remote_port\":5600,\"tp_size\":1,\"remote_num_tokens\":%zu}}";

static bool has(const struct request *request, const char *text)
{
    return memmem(request->body, request->body_length, text, strlen(text)) != NULL;
}

bool take_nixl_leg(const struct request *request, struct handed *handed)
{
    handed->handles += has(request, ENGINE);
    bool is_prefill =
        has(request, "\"do_remote_decode\":true") || has(request, "\"do_remote_decode\": true");
    handed->prefills += is_prefill;
    return is_prefill;
}

void *meet_in_room(const struct request *request, void *leg, bool *roomless)
{
    static struct {
        long room;
        void *leg; /* NULL: free */
    } waiting[MAX_WAITING];
    static int used, next;
    long room = number_after(request, "\"bootstrap_room\"", -1);
    *roomless = room < 0;
    if (*roomless)
        return NULL;
    for (int i = 0; i < used; i++)
        if (waiting[i].leg && waiting[i].room == room) {
            void *other = waiting[i].leg;
            waiting[i].leg = NULL;
            return other;
        }
    /* A free place; where there is none, whoever waited in vain for longest is forgotten. */
    int place = 0;
    while (place < used && waiting[place].leg)
        place++;
    if (place == MAX_WAITING)
        place = next++ % MAX_WAITING;
    else if (place == used)
        used++;
    waiting[place].room = room;
    waiting[place].leg = leg;
    return NULL;
}

const char *handle_for(size_t tokens)
{
    static char text[sizeof HEAD + MAX_BLOCKS * (BLOCK_CHARACTERS + 1) + sizeof TAIL + 128];
    static size_t text_tokens = (size_t)-1; /* kept, as prompts of one run have one length */
    if (tokens == text_tokens)
        return text;
    size_t blocks = (tokens + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    char *to = stpcpy(text, HEAD);
    for (size_t i = 0; i < blocks && i < MAX_BLOCKS; i++)
        to += sprintf(to, "%s%zu", i ? "," : "", i + 1);
    sprintf(to, TAIL, ENGINE, tokens);
    text_tokens = tokens;
    return text;
}
