/* A load generator that costs next to nothing: HTTP/1.1 over one epoll thread, one JSON line out.
 *
 *     loadgen -p PORT [-c CONNECTIONS] [-d SECONDS] [-w WARM_UP_SECONDS] [-N REQUESTS]
 *             [-n PROMPT_BYTES] [-S SHARED_PERCENT] [-T MESSAGES] [-U] [-H EVERY] [-m MODEL]
 *             [-u PATH] [-G PATH]
 *             [-s -t CHUNKS -g GAP_US] [-r RATE] [-z REST_US] [-A] [-P PID,PID...] [-M MOCK_PID]
 *
 * Closed loop, each connection sending its next request when its answer is complete; with -r paced
 * to RATE requests per second in all, latencies then counted from the time a request was due.
 * -z  each connection rests this long before its next request: a probe, whose latencies hold no
 *     backlog of its own when it is answered more slowly than it asks
 * -S  80 by default: how much of each prompt is shared by its group (one of 8); the rest, and with
 *     -S 0 all of it, is new in each request
 * -T  2 by default: the messages that a prompt has; as many of them are shared as of the bytes
 * -U  prompts are of many scripts, in UTF-8 (as bytes, not as escapes)
 * -H  each EVERY-th request is a hot prompt: of one more group whose first 80 % are always the same
 * -G  GET this path instead
 * -N  ends after this many requests, sent before or after warming up (-d bounds the time still)
 * -A  take any body; otherwise whole answers must equal each other, and a stream must have exactly
 *     CHUNKS events and [DONE]: those that do not are counted in `bad`
 *
 * SIGTERM or SIGINT ends the run early, with its report.
 *
 * Out: rps, errs (no answer, broken, or not 200), bad, recon (connections opened again), p50, p90,
 * p99, max (us), cpu_us_req and cpu_us_chunk (CPU of the -P processes), util, rss_mb, lg_util,
 * mock_util, and `other`: cores used by anybody else meanwhile, which is the noise; hits: answers
 * with x-calinix-cache-hit: true, hot and hot_hits the same of the hot prompt. `ttft` runs to the
 * first byte of the body. Times are of requests that ended while measuring.
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
#include "prompts.h"
#include "response.h"
#include "usage.h"

enum { MAX_PIDS = 64, MAX_SAMPLES = 4000000, READ_BYTES = 262144, EVENTS_PER_WAIT = 256 };
enum { LONGEST_WAIT_NS = 20000000, RECONNECT_NS = 10000000 };

struct connection {
    int socket; /* -1: not connected */
    bool busy, hot;
    long due_ns;   /* when the next request may go out */
    long since_ns; /* what its latency is counted from */
    bool body_seen;
    char *unsent;
    size_t unsent_length;
    struct response response;
};

static struct {
    int connections, pid_count, pids[MAX_PIDS], mock_pid, hot_every;
    double seconds, warm_up_s, rate;
    long request_limit, rest_ns;
    struct prompt_options prompt;
    const char *get_path;
} options = {.connections = 1,
             .seconds = 5,
             .warm_up_s = 1,
             .prompt = {.path = "/v1/chat/completions",
                        .model = "mock",
                        .port = 8000,
                        .prompt_bytes = 200,
                        .shared_percent = 80,
                        .turns = 2,
                        .max_tokens = 100}};

struct samples {
    float *us;
    long count;
};

static struct {
    long requests, errors, bad, chunks, bytes, reconnects, hits, hot, hot_hits;
    struct samples latency, first_byte;
} seen;

struct books {
    long time_ns;
    double machine_s, self_s, mock_s, proxy_s;
};

static struct connection *connections;
static struct prompt templates[TEMPLATES], hot_template;
static struct expectation expected = {.same = true};
static int poller, idle_count;
static bool measuring;
static volatile sig_atomic_t told_to_stop;
static long started; /* requests sent so far */

/* ---- samples ---- */

static void add_sample(struct samples *samples, long since_ns)
{
    if (measuring && samples->count < MAX_SAMPLES)
        samples->us[samples->count++] = (float)(now_ns() - since_ns) / 1000.0f;
}

static int ascending(const void *left, const void *right)
{
    float a = *(const float *)left, b = *(const float *)right;
    return (a > b) - (a < b);
}

static double percentile(const struct samples *sorted, double share)
{
    if (!sorted->count)
        return 0;
    long at = (long)((double)sorted->count * share);
    return (double)sorted->us[at < sorted->count ? at : sorted->count - 1];
}

/* ---- sending ---- */

static void watch(struct connection *connection, int operation)
{
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = connection};
    if (connection->unsent_length)
        event.events |= EPOLLOUT;
    if (epoll_ctl(poller, operation, connection->socket, &event))
        die("epoll_ctl");
}

static bool open_connection(struct connection *connection)
{
    int on = 1;
    struct sockaddr_in address = {.sin_family = AF_INET,
                                  .sin_port = htons((uint16_t)options.prompt.port),
                                  .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    connection->socket = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(connection->socket, (struct sockaddr *)&address, sizeof address)) {
        close(connection->socket);
        connection->socket = -1;
        return false;
    }
    setsockopt(connection->socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    connection->unsent_length = 0;
    watch(connection, EPOLL_CTL_ADD);
    return true;
}

static void become_idle(struct connection *connection, long due_ns)
{
    if (connection->busy)
        idle_count++;
    connection->busy = false;
    connection->due_ns = due_ns;
}

static void drop_connection(struct connection *connection, bool is_error)
{
    long now = now_ns();
    if (is_error)
        seen.errors++;
    if (connection->socket >= 0)
        close(connection->socket);
    seen.reconnects++;
    bool connected = open_connection(connection);
    if (!connected)
        seen.errors++;
    long next = connected ? now : now + RECONNECT_NS;
    become_idle(connection, connection->due_ns > next ? connection->due_ns : next);
}

static void send_more(struct connection *connection, const char *bytes, size_t length)
{
    ssize_t sent = send(connection->socket, bytes, length, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && errno != EAGAIN) {
        drop_connection(connection, true);
        return;
    }
    if (sent < 0)
        sent = 0;
    bool waited = connection->unsent_length > 0;
    connection->unsent_length = length - (size_t)sent;
    memmove(connection->unsent, bytes + sent, connection->unsent_length);
    if (waited != (connection->unsent_length > 0))
        watch(connection, EPOLL_CTL_MOD);
}

static const struct prompt *choose_prompt(struct connection *connection)
{
    long number = started++;
    connection->hot = options.hot_every && number % options.hot_every == 0;
    const struct prompt *prompt =
        connection->hot ? &hot_template : &templates[options.get_path ? 0 : number % TEMPLATES];
    prompt_number(prompt, (unsigned)number);
    return prompt;
}

static bool may_start(void)
{
    return !options.request_limit || started < options.request_limit;
}

static void start_request(struct connection *connection, long since_ns)
{
    if (!may_start())
        return;
    const struct prompt *prompt = choose_prompt(connection);
    connection->busy = true;
    idle_count--;
    connection->since_ns = since_ns;
    connection->body_seen = false;
    response_reset(&connection->response);
    send_more(connection, prompt->bytes, prompt->length);
}

/* Starts what is due; returns the time of the next one. */
static long start_due(long now)
{
    long next = now + LONGEST_WAIT_NS;
    if (!idle_count || !may_start())
        return next;
    long period_ns =
        options.rate > 0 ? (long)((double)options.connections / options.rate * NS_PER_S) : 0;
    for (int i = 0; i < options.connections; i++) {
        struct connection *connection = &connections[i];
        if (!connection->busy && connection->due_ns <= now) {
            long due_ns = connection->due_ns;
            if (connection->socket < 0 && !open_connection(connection)) {
                seen.errors++;
                connection->due_ns = now + RECONNECT_NS;
            } else {
                connection->due_ns = due_ns + period_ns;
                start_request(connection, period_ns ? due_ns : now);
            }
        }
        if (!connection->busy && connection->due_ns < next)
            next = connection->due_ns;
    }
    return next;
}

/* ---- receiving ---- */

static void judge(const struct connection *connection)
{
    const struct response *response = &connection->response;
    bool is_whole_stream =
        response->events == options.prompt.max_tokens && response->done_seen;
    if (response->status != 200)
        seen.errors++;
    else if (expected.same)
        seen.bad += expected.stream ? !is_whole_stream : response->differs;
    if (!measuring)
        return;
    seen.requests++;
    seen.hits += response->cache_hit;
    seen.hot += connection->hot;
    seen.hot_hits += connection->hot && response->cache_hit;
}

static void finish(struct connection *connection, bool keep_open)
{
    judge(connection);
    add_sample(&seen.latency, connection->since_ns);
    long now = now_ns();
    become_idle(connection, options.rate > 0 ? connection->due_ns : now + options.rest_ns);
    if (!keep_open)
        drop_connection(connection, false);
    else if (options.rate <= 0 && !options.rest_ns)
        start_request(connection, now);
}

static void count_progress(struct connection *connection, long bytes, long events_before)
{
    if (!connection->body_seen && connection->response.body_length) {
        connection->body_seen = true;
        if (expected.stream)
            add_sample(&seen.first_byte, connection->since_ns);
    }
    if (measuring) {
        seen.bytes += bytes;
        seen.chunks += connection->response.events - events_before;
    }
}

static void on_closed(struct connection *connection)
{
    if (connection->busy)
        response_closed(&connection->response);
    if (connection->busy && connection->response.complete)
        finish(connection, false);
    else
        drop_connection(connection, connection->busy);
}

static void on_readable(struct connection *connection)
{
    static char bytes[READ_BYTES];
    ssize_t count = recv(connection->socket, bytes, sizeof bytes, MSG_DONTWAIT);
    if (count < 0 && errno == EAGAIN)
        return;
    if (count <= 0) {
        on_closed(connection);
        return;
    }
    if (!connection->busy) { /* an answer that nobody asked for */
        drop_connection(connection, true);
        return;
    }
    struct response *response = &connection->response;
    long events_before = response->events;
    size_t used = response_feed(response, &expected, bytes, (size_t)count);
    count_progress(connection, count, events_before);
    if (response->broken || (response->complete && used < (size_t)count))
        drop_connection(connection, true);
    else if (response->complete)
        finish(connection, !response->close_after && !connection->unsent_length);
}

static void on_event(struct connection *connection, unsigned events)
{
    if ((events & EPOLLOUT) && connection->unsent_length)
        send_more(connection, connection->unsent, connection->unsent_length);
    else
        on_readable(connection);
}

/* ---- the run ---- */

static struct books read_books(void)
{
    struct books books = {.time_ns = now_ns(),
                          .machine_s = usage_machine_s(),
                          .self_s = usage_cpu_s(getpid())};
    if (options.mock_pid)
        books.mock_s = usage_cpu_s(options.mock_pid);
    for (int i = 0; i < options.pid_count; i++)
        books.proxy_s += usage_cpu_s(options.pids[i]);
    return books;
}

static void report(const struct books *from)
{
    struct books to = read_books();
    double seconds = (double)(to.time_ns - from->time_ns) / NS_PER_S, rss_mb = 0;
    double proxy_s = to.proxy_s - from->proxy_s, self = (to.self_s - from->self_s) / seconds;
    double mock = (to.mock_s - from->mock_s) / seconds;
    double machine = (to.machine_s - from->machine_s) / seconds;
    for (int i = 0; i < options.pid_count; i++)
        rss_mb += usage_rss_mb(options.pids[i]);
    qsort(seen.latency.us, (size_t)seen.latency.count, sizeof(float), ascending);
    qsort(seen.first_byte.us, (size_t)seen.first_byte.count, sizeof(float), ascending);
    printf("{\"c\":%d,\"n\":%zu,\"stream\":%d,\"seconds\":%.3f,\"requests\":%ld,\"rps\":%.1f,"
           "\"errs\":%ld,\"bad\":%ld,\"recon\":%ld",
           options.connections, options.prompt.prompt_bytes, options.prompt.stream, seconds,
           seen.requests, (double)seen.requests / seconds, seen.errors, seen.bad, seen.reconnects);
    printf(",\"p50\":%.1f,\"p90\":%.1f,\"p99\":%.1f,\"max\":%.1f", percentile(&seen.latency, 0.5),
           percentile(&seen.latency, 0.9), percentile(&seen.latency, 0.99),
           percentile(&seen.latency, 1.0));
    printf(",\"cpu_us_req\":%.2f,\"util\":%.3f,\"rss_mb\":%.1f,\"lg_util\":%.3f,"
           "\"mock_util\":%.3f,\"other\":%.3f",
           seen.requests ? proxy_s * 1e6 / (double)seen.requests : 0, proxy_s / seconds, rss_mb,
           self, mock, machine - mock - self - proxy_s / seconds);
    printf(",\"bytes\":%ld,\"body_bytes\":%zu,\"hits\":%ld,\"hot\":%ld,\"hot_hits\":%ld",
           seen.bytes, expected.first_length, seen.hits, seen.hot, seen.hot_hits);
    if (expected.stream)
        printf(",\"chunks_s\":%.1f,\"cpu_us_chunk\":%.3f,\"ttft50\":%.1f,\"ttft99\":%.1f",
               (double)seen.chunks / seconds, seen.chunks ? proxy_s * 1e6 / (double)seen.chunks : 0,
               percentile(&seen.first_byte, 0.5), percentile(&seen.first_byte, 0.99));
    printf("}\n");
}

static struct books begin_measuring(void)
{
    measuring = true;
    /* Of the warm-up only what went wrong is kept. */
    seen.requests = seen.chunks = seen.bytes = 0;
    return read_books();
}

static void on_signal(int number)
{
    (void)number;
    told_to_stop = 1;
}

static void run(void)
{
    struct epoll_event events[EVENTS_PER_WAIT];
    struct books from = {0};
    long measure_from = now_ns() + (long)(options.warm_up_s * NS_PER_S);
    long end = measure_from + (long)(options.seconds * NS_PER_S);
    for (;;) {
        long now = now_ns();
        if (!measuring && now >= measure_from)
            from = begin_measuring();
        bool all_answered = !may_start() && idle_count == options.connections;
        if (now >= end || all_answered || told_to_stop)
            break;
        long wait_ns = start_due(now) - now_ns();
        struct timespec timeout = {.tv_nsec = wait_ns > 0 ? wait_ns : 0};
        int count = epoll_pwait2(poller, events, EVENTS_PER_WAIT, &timeout, NULL);
        for (int i = 0; i < count; i++) /* count is -1 when a signal came */
            on_event(events[i].data.ptr, events[i].events);
    }
    if (!measuring)
        from = begin_measuring();
    report(&from);
}

static void prepare(void)
{
    size_t longest = 0;
    long now = now_ns();
    for (int i = 0; i < TEMPLATES; i++) {
        templates[i] = options.get_path ? prompt_get(&options.prompt)
                                        : prompt_make(&options.prompt, i % GROUPS, i);
        if (templates[i].length > longest)
            longest = templates[i].length;
    }
    struct prompt_options hot = options.prompt;
    hot.shared_percent = 80;
    hot_template = prompt_make(&hot, GROUPS, TEMPLATES);
    if (hot_template.length > longest)
        longest = hot_template.length;
    seen.latency.us = must_allocate(malloc(MAX_SAMPLES * sizeof(float)));
    seen.first_byte.us = must_allocate(malloc(MAX_SAMPLES * sizeof(float)));
    connections = must_allocate(calloc((size_t)options.connections, sizeof *connections));
    poller = epoll_create1(0);
    for (int i = 0; i < options.connections; i++) {
        connections[i].unsent = must_allocate(malloc(longest));
        if (options.rate > 0) /* spread over one period */
            connections[i].due_ns = now + (long)((double)i / options.rate * NS_PER_S);
        if (!open_connection(&connections[i]))
            die("connect");
    }
    idle_count = options.connections;
}

static void read_pids(char *list)
{
    for (char *pid = strtok(list, ","); pid && options.pid_count < MAX_PIDS; pid = strtok(NULL, ","))
        options.pids[options.pid_count++] = atoi(pid);
}

static void read_option(int option)
{
    switch (option) {
    case 'p': options.prompt.port = atoi(optarg); break;
    case 'c': options.connections = atoi(optarg); break;
    case 'd': options.seconds = atof(optarg); break;
    case 'w': options.warm_up_s = atof(optarg); break;
    case 'N': options.request_limit = atol(optarg); break;
    case 'n': options.prompt.prompt_bytes = strtoul(optarg, NULL, 10); break;
    case 'S': options.prompt.shared_percent = atoi(optarg); break;
    case 'T': options.prompt.turns = atoi(optarg); break;
    case 'U': options.prompt.wide = true; break;
    case 'H': options.hot_every = atoi(optarg); break;
    case 'm': options.prompt.model = optarg; break;
    case 'u': options.prompt.path = optarg; break;
    case 'G': options.prompt.path = options.get_path = optarg; break;
    case 's': options.prompt.stream = expected.stream = true; break;
    case 't': options.prompt.max_tokens = atoi(optarg); break;
    case 'g': options.prompt.gap_us = atol(optarg); break;
    case 'r': options.rate = atof(optarg); break;
    case 'z': options.rest_ns = 1000 * atol(optarg); break;
    case 'A': expected.same = false; break;
    case 'P': read_pids(optarg); break;
    case 'M': options.mock_pid = atoi(optarg); break;
    default: exit(2);
    }
}

int main(int argument_count, char **arguments)
{
    static const char OPTIONS[] = "p:c:d:w:N:n:S:T:UH:m:u:G:st:g:r:z:AP:M:";
    int option;
    signal(SIGPIPE, SIG_IGN);
    signal(SIGTERM, on_signal);
    signal(SIGINT, on_signal);
    while ((option = getopt(argument_count, arguments, OPTIONS)) != -1)
        read_option(option);
    if (optind < argument_count || options.connections < 1 || options.prompt.turns < 1 ||
        options.prompt.shared_percent < 0 ||
        options.prompt.shared_percent > 100) {
        fprintf(stderr, "usage: see the head of loadgen.c\n");
        return 2;
    }
    prepare();
    run();
    return 0;
}
