/* A mock OpenAI engine that costs next to nothing, so that a benchmark sees only the proxy in front.
 *
 *     mock_upstream [-x nixl|sglang] [-w US,US...] PORT...
 *
 * One pod for each port (0: any free one), all in this one process.
 * -x  prefill and decode apart: a prefill leg of vLLM's NIXL gets a handle; SGLang's two legs wait for
 *     each other, and that of the pod named first is the prefill's
 * -w  how long each pod, in the order of the ports, takes for a whole answer; 0 for those not named
 *
 * The ports are printed on standard output, in the order given, once all of them listen.
 * POST (any path): one whole JSON answer, or with "stream":true `max_tokens` SSE events that are
 * `seed` microseconds apart; both are standard OpenAI fields, so every proxy lets them through. A pod
 * sends the events of all its streams together, as an engine's step yields a token for each request.
 * POST .../render: 403, as vLLM says unless it was started with --enable-scale-out.
 * GET: /health /v1/models /metrics /version /get_server_info /v1/loads, and /stats: "PORT REQUESTS"
 * for each pod, "bytes N", the bytes of all request bodies, and what was handed on (handoff.h).
 *
 * One thread over epoll. What is sent later waits in a heap, ordered by the time it is due.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdbool.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common.h"
#include "handoff.h"
#include "request.h"

enum {
    MAX_PODS = 64,
    READ_ROOM = 16384,
    MAX_REQUEST = 128 << 20,
    MAX_UNSENT = 1 << 20, /* a stream whose reader is this far behind waits for it */
    EVENTS_PER_WAIT = 256,
};

enum watched { A_POD, A_CONNECTION };

struct pod {
    enum watched kind; /* first in both structs: epoll hands back a pointer to it */
    int listener;
    int port;
    long requests, service_ns;
};

struct connection {
    enum watched kind;
    int socket;
    struct pod *pod;
    char *received;
    size_t received_length, received_room;
    char *unsent;
    size_t unsent_length, unsent_room;
    bool streaming; /* its answer is under way: in the heap, or it waits for the other leg */
    bool streams;   /* what it asked for: events, not a whole answer */
    bool late;      /* and will be a whole one */
    bool closing, broken, is_prefill;
    size_t prompt_tokens;
    long events_left, gap_ns, due_ns;
};

static struct pod pods[MAX_PODS];
static int pod_count;
static long body_bytes_received;
static enum handoff handoff;
static struct handed handed;
static int poller;

static struct connection **heap; /* streams by due_ns, the earliest first */
static size_t heap_length, heap_room;

/* ---- the answers ---- */

/* The text is padded, so that every answer has ANSWER_BYTES whatever its numbers are. */
static const char CHAT_ANSWER[] =
    "{\"id\":\"chatcmpl-00112233445566778899aabbccddeeff\",\"object\":\"chat.completion\","
    "\"created\":1700000000,\"model\":\"mock\",\"choices\":[{\"index\":0,\"message\":{\"role\":"
    "\"assistant\",\"content\":\"A short answer from the mock engine; its length is fixed, so that "
    "a body has exactly 400 bytes.%*s\"},\"logprobs\":null,\"finish_reason\":\"stop\"}],\"usage\":{"
    "\"completion_tokens\":25,\"prompt_tokens\":%zu,\"total_tokens\":%zu}}";
enum { ANSWER_BYTES = 400, BYTES_PER_TOKEN = 4, MAX_HANDLE = 64 << 10 };

static const char STREAM_EVENT[] =
    "data: {\"id\":\"chatcmpl-00112233445566778899aabbccddeeff\",\"object\":"
    "\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"mock\",\"choices\":[{\"index\":0,"
    "\"delta\":{\"content\":\" token\"},\"logprobs\":null,\"finish_reason\":null}]}\n\n";
_Static_assert(sizeof STREAM_EVENT - 1 == 217, "a streamed event has 217 bytes");

static const char STREAM_HEAD[] = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
                                  "transfer-encoding: chunked\r\n\r\n";
static const char STREAM_END[] = "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";

#define MODELS(ENGINE)                                                                             \
    "{\"object\":\"list\",\"data\":[{\"id\":\"mock\",\"object\":\"model\",\"created\":1700000000,"          \
    "\"owned_by\":\"" ENGINE "\",\"root\":\"mock\",\"max_model_len\":131072}]}"

static const struct {
    const char *path, *type, *body;
} PAGES[] = {
    {"/health", "text/plain", "OK"},
    {"/v1/models", "application/json", MODELS("vllm")},
    {"/metrics", "text/plain",
     "vllm:num_requests_running{model_name=\"mock\"} 0\n"
     "vllm:num_requests_waiting{model_name=\"mock\"} 0\n"
     "vllm:kv_cache_usage_perc{model_name=\"mock\"} 0.1\n"},
    {"/version", "application/json", "{\"version\":\"0.11.0\"}"},
    {"/v1/loads", "application/json",
     "[{\"dp_rank\":0,\"num_reqs\":0,\"num_waiting_reqs\":0,\"num_tokens\":0}]"},
    {"/get_load", "application/json",
     "[{\"dp_rank\":0,\"num_reqs\":0,\"num_waiting_reqs\":0,\"num_tokens\":0}]"},
};
static const char SERVER_INFO[] =
    "{\"model_path\":\"mock\",\"served_model_name\":\"mock\",\"model_id\":\"mock\","
    "\"is_generation\":true,\"tp_size\":1,\"dp_size\":1,\"pp_size\":1,"
    "\"max_total_num_tokens\":1000000,\"max_req_input_len\":131072,\"context_length\":131072,"
    "\"max_num_seqs\":256,\"version\":\"0.5.0\",\"disaggregation_mode\":\"null\"}";

/* ---- sending ---- */

static void watch(struct connection *connection, int operation)
{
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = connection};
    if (connection->unsent_length)
        event.events |= EPOLLOUT;
    if (epoll_ctl(poller, operation, connection->socket, &event))
        die("epoll_ctl");
}

static void keep_unsent(struct connection *connection, const char *bytes, size_t length)
{
    size_t needed = connection->unsent_length + length;
    if (needed > connection->unsent_room) {
        connection->unsent_room = 2 * needed;
        connection->unsent = must_allocate(realloc(connection->unsent, connection->unsent_room));
    }
    memcpy(connection->unsent + connection->unsent_length, bytes, length);
    bool was_empty = connection->unsent_length == 0;
    connection->unsent_length = needed;
    if (was_empty)
        watch(connection, EPOLL_CTL_MOD);
}

static void send_bytes(struct connection *connection, const char *bytes, size_t length)
{
    ssize_t sent = 0;
    if (connection->broken)
        return;
    if (connection->unsent_length == 0)
        sent = send(connection->socket, bytes, length, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && errno != EAGAIN) {
        connection->broken = true;
        return;
    }
    if (sent < 0)
        sent = 0;
    if ((size_t)sent < length)
        keep_unsent(connection, bytes + sent, length - (size_t)sent);
}

static void send_unsent(struct connection *connection)
{
    ssize_t sent = send(connection->socket, connection->unsent, connection->unsent_length,
                        MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0) {
        connection->broken = errno != EAGAIN;
        return;
    }
    connection->unsent_length -= (size_t)sent;
    memmove(connection->unsent, connection->unsent + sent, connection->unsent_length);
    if (connection->unsent_length == 0)
        watch(connection, EPOLL_CTL_MOD);
}

static void send_page(struct connection *connection, const char *type, const char *body)
{
    static char answer[8192 + MAX_HANDLE];
    int length = snprintf(answer, sizeof answer,
                          "HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %zu\r\n\r\n%s",
                          type, strlen(body), body);
    send_bytes(connection, answer, (size_t)length);
}

static void send_refusal(struct connection *connection, const char *status, const char *message)
{
    char answer[1024];
    int length = snprintf(answer, sizeof answer,
                          "HTTP/1.1 %s\r\ncontent-type: application/json\r\n"
                          "content-length: %zu\r\n\r\n{\"error\":{\"message\":\"%s\"}}",
                          status, strlen(message) + sizeof "{\"error\":{\"message\":\"\"}}" - 1,
                          message);
    send_bytes(connection, answer, (size_t)length);
}

static void send_stats(struct connection *connection)
{
    char body[4096];
    int length = 0;
    for (int i = 0; i < pod_count; i++)
        length += snprintf(body + length, sizeof body - (size_t)length, "%d %ld\n", pods[i].port,
                           pods[i].requests);
    snprintf(body + length, sizeof body - (size_t)length,
             "bytes %ld\nprefills %ld\nhandles %ld\nmeetings %ld\n", body_bytes_received,
             handed.prefills, handed.handles, handed.meetings);
    send_page(connection, "text/plain", body);
}

/* ---- streams ---- */

static void heap_swap(size_t a, size_t b)
{
    struct connection *held = heap[a];
    heap[a] = heap[b];
    heap[b] = held;
}

static void heap_push(struct connection *connection)
{
    if (heap_length == heap_room) {
        heap_room = heap_room ? 2 * heap_room : 256;
        heap = must_allocate(realloc(heap, heap_room * sizeof *heap));
    }
    size_t at = heap_length++;
    heap[at] = connection;
    while (at && heap[at]->due_ns < heap[(at - 1) / 2]->due_ns) {
        heap_swap(at, (at - 1) / 2);
        at = (at - 1) / 2;
    }
}

static struct connection *heap_pop(void)
{
    struct connection *first = heap[0];
    heap[0] = heap[--heap_length];
    for (size_t at = 0;;) {
        size_t least = at;
        for (size_t child = 2 * at + 1; child <= 2 * at + 2; child++)
            if (child < heap_length && heap[child]->due_ns < heap[least]->due_ns)
                least = child;
        if (least == at)
            return first;
        heap_swap(at, least);
        at = least;
    }
}

static void send_event(struct connection *connection)
{
    char chunk[sizeof STREAM_EVENT + 16];
    int length =
        snprintf(chunk, sizeof chunk, "%zx\r\n%s\r\n", sizeof STREAM_EVENT - 1, STREAM_EVENT);
    send_bytes(connection, chunk, (size_t)length);
}

/* The next step of a pod whose steps are `gap_ns` apart; pods take turns. So it is always the same
 * number of events that comes at once, not what the moments of the requests happen to make of it. */
static long next_step(const struct pod *pod, long gap_ns)
{
    long now = now_ns();
    if (!gap_ns)
        return now;
    long turn_ns = gap_ns * (pod - pods) / pod_count;
    return now + gap_ns - (now - turn_ns) % gap_ns;
}

static void begin_stream(struct connection *connection)
{
    connection->due_ns = next_step(connection->pod, connection->gap_ns);
    connection->streaming = true;
    /* Headers at once, as vLLM sends them before its generator runs. */
    send_bytes(connection, STREAM_HEAD, sizeof STREAM_HEAD - 1);
    heap_push(connection);
}

/* ---- requests ---- */

static void answer_get(struct connection *connection, const struct request *request)
{
    const char *path = request->target + 1;
    if (handoff == SGLANG && strncmp(path, "/version", 8) == 0) { /* only vLLM has it */
        send_refusal(connection, "404 Not Found", "no such path");
        return;
    }
    if (handoff == SGLANG && strncmp(path, "/v1/models", 10) == 0) {
        send_page(connection, "application/json", MODELS("sglang"));
        return;
    }
    if (strncmp(path, "/stats", 6) == 0) {
        send_stats(connection);
        return;
    }
    for (size_t i = 0; i < sizeof PAGES / sizeof *PAGES; i++)
        if (strncmp(path, PAGES[i].path, strlen(PAGES[i].path)) == 0) {
            send_page(connection, PAGES[i].type, PAGES[i].body);
            return;
        }
    send_page(connection, "application/json", SERVER_INFO);
}

/* Its usage says one token for four characters: gateways learn the size of tokens from it. */
static void send_chat_answer(struct connection *connection)
{
    static char text[2 * ANSWER_BYTES]; /* kept, as prompts of one run have one length */
    static char with_handle[2 * ANSWER_BYTES + MAX_HANDLE];
    static size_t text_tokens = (size_t)-1;
    size_t tokens = connection->prompt_tokens;
    bool has_handle = handoff == NIXL && connection->is_prefill;
    if (tokens != text_tokens) {
        int length = snprintf(text, sizeof text, CHAT_ANSWER, 0, "", tokens, tokens + 25);
        snprintf(text, sizeof text, CHAT_ANSWER, ANSWER_BYTES - length, "", tokens, tokens + 25);
        text_tokens = tokens;
    }
    if (has_handle) {
        char *closing = mempcpy(with_handle, text, ANSWER_BYTES - 1); /* without its last brace */
        strcpy(closing, handle_for(tokens));
    }
    send_page(connection, "application/json", has_handle ? with_handle : text);
}

static void begin_answer(struct connection *connection)
{
    if (connection->streams) {
        begin_stream(connection);
    } else if (!connection->pod->service_ns) {
        connection->streaming = false;
        send_chat_answer(connection);
    } else {
        connection->late = connection->streaming = true;
        connection->due_ns = now_ns() + connection->pod->service_ns;
        heap_push(connection);
    }
}

/* What is to be answered is kept, as the other leg may be what it waits for. */
static void read_wishes(struct connection *connection, const struct request *request)
{
    long otherwise = number_after(request, "\"max_completion_tokens\"", 100);
    connection->streams = wants_stream(request);
    connection->prompt_tokens = prompt_length(request) / BYTES_PER_TOKEN;
    connection->events_left = number_after(request, "\"max_tokens\"", otherwise);
    connection->gap_ns = 1000 * number_after(request, "\"seed\"", 0);
    connection->is_prefill = handoff == NIXL && take_nixl_leg(request, &handed);
}

static void answer_all(struct connection *connection);
static void close_if_over(struct connection *connection);

/* Both legs are answered once both are there. */
static void meet(struct connection *connection, const struct request *request)
{
    bool roomless;
    struct connection *other = meet_in_room(request, connection, &roomless);
    if (roomless) { /* a decode pod serves nothing that is not prefilled elsewhere */
        send_refusal(connection, "400 Bad Request", "no bootstrap_room");
        return;
    }
    if (!other) {
        connection->streaming = true;
        return;
    }
    handed.meetings++;
    struct connection *prefill = other->pod < connection->pod ? other : connection;
    prefill->events_left = 1;
    begin_answer(prefill);
    begin_answer(prefill == other ? connection : other);
    /* The other one has been waiting: nobody else goes on with what it sent meanwhile. */
    if (!other->streaming) {
        answer_all(other);
        close_if_over(other);
    }
}

static bool target_ends_with(const struct request *request, const char *name)
{
    const char *end = strpbrk(request->target + 1, " ?\r"); /* a head has a CR at the latest */
    size_t length = strlen(name);
    return end - request->target > (long)length && memcmp(end - length, name, length) == 0;
}

static void answer(struct connection *connection, const struct request *request)
{
    if (request->is_get) {
        answer_get(connection, request);
        return;
    }
    if (target_ends_with(request, "/render")) {
        send_refusal(connection, "403 Forbidden", "Scale-out endpoints are disabled.");
        return;
    }
    connection->pod->requests++;
    body_bytes_received += (long)request->body_length;
    read_wishes(connection, request);
    if (handoff == SGLANG)
        meet(connection, request);
    else
        begin_answer(connection);
}

static void answer_all(struct connection *connection)
{
    while (!connection->streaming && !connection->closing && !connection->broken) {
        struct request request;
        if (!next_request(connection->received, connection->received_length, &request))
            return;
        if (!request.target) {
            connection->broken = true;
            return;
        }
        answer(connection, &request);
        connection->closing = request.close_after;
        connection->received_length -= request.total_length;
        memmove(connection->received, connection->received + request.total_length,
                connection->received_length);
    }
}

/* ---- connections ---- */

static void accept_all(struct pod *pod)
{
    int socket, on = 1;
    while ((socket = accept4(pod->listener, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
        setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        struct connection *connection = must_allocate(calloc(1, sizeof *connection));
        connection->kind = A_CONNECTION;
        connection->socket = socket;
        connection->pod = pod;
        watch(connection, EPOLL_CTL_ADD);
    }
}

static void read_all(struct connection *connection)
{
    for (;;) {
        size_t room = connection->received_room - connection->received_length;
        if (room < READ_ROOM) {
            connection->received_room = 2 * connection->received_room + READ_ROOM;
            connection->received =
                must_allocate(realloc(connection->received, connection->received_room));
            room = connection->received_room - connection->received_length;
        }
        ssize_t count = recv(connection->socket, connection->received + connection->received_length,
                             room, MSG_DONTWAIT);
        if (count < 0 && errno == EAGAIN)
            return;
        if (count <= 0 || connection->received_length > MAX_REQUEST) {
            connection->broken = true;
            return;
        }
        connection->received_length += (size_t)count;
        if ((size_t)count < room) /* a short read: nothing more for now, spare a system call */
            return;
    }
}

/* A stream's connection is still in the heap: only its socket closes now, the rest when it is due. */
static void close_if_over(struct connection *connection)
{
    bool all_sent = connection->closing && !connection->streaming && !connection->unsent_length;
    if (!connection->broken && !all_sent)
        return;
    if (connection->socket >= 0)
        close(connection->socket);
    connection->socket = -1;
    if (connection->streaming)
        return;
    free(connection->received);
    free(connection->unsent);
    free(connection);
}

static void continue_stream(struct connection *connection, long now)
{
    if (connection->late) {
        connection->late = connection->streaming = false;
        send_chat_answer(connection);
        answer_all(connection);
        close_if_over(connection);
        return;
    }
    if (connection->unsent_length > MAX_UNSENT) {
        connection->due_ns = now + 1000000;
    } else if (connection->events_left > 0) {
        connection->events_left--;
        send_event(connection);
        connection->due_ns += connection->gap_ns;
        if (connection->due_ns < now - NS_PER_S) /* far behind: do not catch up with a burst */
            connection->due_ns = now;
    } else {
        send_bytes(connection, STREAM_END, sizeof STREAM_END - 1);
        connection->streaming = false;
        answer_all(connection);
        close_if_over(connection);
        return;
    }
    if (connection->broken) {
        connection->streaming = false;
        close_if_over(connection);
        return;
    }
    heap_push(connection);
}

static void run_due_streams(void)
{
    long now = now_ns();
    /* Bounded, so that new requests are heard between two batches. */
    for (int i = 0; i < EVENTS_PER_WAIT && heap_length && heap[0]->due_ns <= now; i++) {
        struct connection *connection = heap_pop();
        if (connection->broken) {
            connection->streaming = false;
            close_if_over(connection);
        } else {
            continue_stream(connection, now);
        }
    }
}

static void on_connection(struct connection *connection, unsigned events)
{
    if (events & EPOLLOUT)
        send_unsent(connection);
    if (events & (EPOLLIN | EPOLLHUP | EPOLLERR))
        read_all(connection);
    if (!connection->broken)
        answer_all(connection);
    close_if_over(connection);
}

static void listen_on(struct pod *pod, int port)
{
    int on = 1;
    struct sockaddr_in address = {.sin_family = AF_INET,
                                  .sin_port = htons((uint16_t)port),
                                  .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    pod->kind = A_POD;
    pod->listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    setsockopt(pod->listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(pod->listener, (struct sockaddr *)&address, length))
        die("bind");
    if (listen(pod->listener, 4096))
        die("listen");
    getsockname(pod->listener, (struct sockaddr *)&address, &length);
    pod->port = ntohs(address.sin_port);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = pod};
    if (epoll_ctl(poller, EPOLL_CTL_ADD, pod->listener, &event))
        die("epoll_ctl");
}

static int wait_for_events(struct epoll_event *events)
{
    struct timespec timeout = {0}, *limit = NULL;
    if (heap_length) {
        long wait_ns = heap[0]->due_ns - now_ns();
        if (wait_ns > 0) {
            timeout.tv_sec = wait_ns / NS_PER_S;
            timeout.tv_nsec = wait_ns % NS_PER_S;
        }
        limit = &timeout;
    }
    return epoll_pwait2(poller, events, EVENTS_PER_WAIT, limit, NULL);
}

static void read_service_times(char *list)
{
    int pod = 0;
    for (char *us = strtok(list, ","); us && pod < MAX_PODS; us = strtok(NULL, ","))
        pods[pod++].service_ns = 1000 * atol(us);
}

static bool read_options(int argument_count, char **arguments)
{
    int option;
    while ((option = getopt(argument_count, arguments, "x:w:")) != -1) {
        if (option == 'w')
            read_service_times(optarg);
        else if (option == 'x' && strcmp(optarg, "nixl") == 0)
            handoff = NIXL;
        else if (option == 'x' && strcmp(optarg, "sglang") == 0)
            handoff = SGLANG;
        else
            return false;
    }
    return optind < argument_count && argument_count - optind <= MAX_PODS;
}

int main(int argument_count, char **arguments)
{
    struct epoll_event events[EVENTS_PER_WAIT];
    if (!read_options(argument_count, arguments)) {
        fprintf(stderr, "usage: see the head of mock_upstream.c (at most %d pods)\n", MAX_PODS);
        return 2;
    }
    signal(SIGPIPE, SIG_IGN);
    poller = epoll_create1(0);
    for (int i = optind; i < argument_count; i++) {
        listen_on(&pods[pod_count++], atoi(arguments[i]));
        printf("%d%s", pods[pod_count - 1].port, i + 1 < argument_count ? " " : "\n");
    }
    fflush(stdout);
    for (;;) {
        int count = wait_for_events(events);
        for (int i = 0; i < count; i++) {
            if (*(enum watched *)events[i].data.ptr == A_POD)
                accept_all(events[i].data.ptr);
            else
                on_connection(events[i].data.ptr, events[i].events);
        }
        run_due_streams();
    }
}
