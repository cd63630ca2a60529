/* What processes and the whole machine use, from the kernel's books. */
#ifndef USAGE_H
#define USAGE_H

/* CPU seconds of a process with all of its threads since it began; 0 when it is gone. */
double usage_cpu_s(int pid);

/* Resident memory of a process. */
double usage_rss_mb(int pid);

/* CPU seconds of everybody on this machine. */
double usage_machine_s(void);

#endif
