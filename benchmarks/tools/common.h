/* What both tools share: the clock, and ending with a message. */
#ifndef COMMON_H
#define COMMON_H

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define NS_PER_S 1000000000L

static inline long now_ns(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * NS_PER_S + time.tv_nsec;
}

static inline void die(const char *what)
{
    perror(what);
    exit(1);
}

static inline void *must_allocate(void *memory)
{
    if (!memory)
        die("out of memory");
    return memory;
}

#endif
