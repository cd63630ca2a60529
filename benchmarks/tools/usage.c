/* CPU time from the process clock, which counts nanoseconds; /proc/PID/stat has 10 ms ticks. */
#define _GNU_SOURCE
#include "usage.h"

#include <stdio.h>
#include <time.h>
#include <unistd.h>

double usage_cpu_s(int pid)
{
    clockid_t clock;
    struct timespec time;
    if (clock_getcpuclockid(pid, &clock) || clock_gettime(clock, &time))
        return 0;
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

double usage_rss_mb(int pid)
{
    char name[64];
    long pages = 0;
    snprintf(name, sizeof name, "/proc/%d/statm", pid);
    FILE *file = fopen(name, "r");
    if (!file)
        return 0;
    if (fscanf(file, "%*d %ld", &pages) != 1)
        pages = 0;
    fclose(file);
    return (double)pages * (double)sysconf(_SC_PAGESIZE) / 1048576.0;
}

double usage_machine_s(void)
{
    long user, nice, system, idle, wait, irq, soft_irq;
    FILE *file = fopen("/proc/stat", "r");
    if (!file)
        return 0;
    int fields = fscanf(file, "cpu %ld %ld %ld %ld %ld %ld %ld", &user, &nice, &system, &idle,
                        &wait, &irq, &soft_irq);
    fclose(file);
    if (fields != 7)
        return 0;
    return (double)(user + nice + system + irq + soft_irq) / (double)sysconf(_SC_CLK_TCK);
}
