// Records calls, calls that waited for the device, and broken rules.
#define _GNU_SOURCE
#include "null_cuda.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static pthread_mutex_t mutex = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static Counter *counters;
static char *complaints;
static size_t complaints_size;
typedef void (*OnSync)(const char *name, uint64_t bytes);
static OnSync on_sync;

void lock(void) { pthread_mutex_lock(&mutex); }
void unlock(void) { pthread_mutex_unlock(&mutex); }

void count(Counter *counter) {
    if (counter->calls++ == 0) {
        counter->next = counters;
        counters = counter;
    }
}

void count_name(const char *name) {
    lock();
    Counter *found = counters;
    while (found && strcmp(found->name, name) != 0) found = found->next;
    if (!found) {
        found = calloc(1, sizeof *found);
        found->name = strdup(name);
    }
    count(found);
    unlock();
}

void report_sync(const char *name, size_t bytes) {
    if (on_sync) on_sync(name, bytes);
}

void complain(const char *format, ...) {
    char line[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    fprintf(stderr, "null CUDA: %s\n", line);
    lock();
    size_t length = strlen(line) + 1;
    complaints = realloc(complaints, complaints_size + length + 1);
    memcpy(complaints + complaints_size, line, length - 1);
    complaints_size += length;
    complaints[complaints_size - 1] = '\n';
    complaints[complaints_size] = 0;
    unlock();
}

// Calls `callback` before each call that waits for the device, in the thread that waits.
EXPORT void null_cuda_on_sync(OnSync callback) { on_sync = callback; }

EXPORT uint64_t null_cuda_calls(const char *name) {
    lock();
    const Counter *found = counters;
    while (found && strcmp(found->name, name) != 0) found = found->next;
    uint64_t calls = found ? found->calls : 0;
    unlock();
    return calls;
}

// Lines "name<TAB>number": all counts, what is alive, and memory. Give it back with free().
EXPORT char *null_cuda_counts(void) {
    char *text;
    size_t size;
    lock();
    FILE *out = open_memstream(&text, &size);
    for (const Counter *each = counters; each; each = each->next)
        fprintf(out, "%s\t%llu\n", each->name, (unsigned long long)each->calls);
    const MemorySums sums = memory_sums();
    fprintf(out, "live.device_bytes\t%zu\nlive.pinned_bytes\t%zu\npeak.device_bytes\t%zu\n",
            sums.device_bytes, sums.pinned_bytes, sums.device_peak);
    fprintf(out, "live.streams\t%llu\nlive.events\t%llu\nlive.graphs\t%llu\n",
            (unsigned long long)live_streams(), (unsigned long long)live_events(),
            (unsigned long long)live_graphs());
    fclose(out);
    unlock();
    return text;
}

// Rules that were broken, a line each. Give it back with free().
EXPORT char *null_cuda_complaints(void) {
    lock();
    char *text = strdup(complaints ? complaints : "");
    unlock();
    return text;
}
