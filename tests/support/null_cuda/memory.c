// Which memory is the device's and which is pinned. The device's own is address space alone: that
// the host touches it is a crash, as it is with a real one.
#define _GNU_SOURCE
#include "null_cuda.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static Range *ranges;  // upwards, without overlap
static size_t range_count, range_room;
static size_t used[DEVICES_MAX], peak, pinned;

static size_t from_environment(const char *name, size_t otherwise) {
    const char *value = getenv(name);
    return value ? strtoull(value, NULL, 10) : otherwise;
}

int device_count(void) {
    size_t wanted = from_environment("NULL_CUDA_DEVICES", 1);
    return wanted > DEVICES_MAX ? DEVICES_MAX : (int)wanted;
}

int capability(void) { return (int)from_environment("NULL_CUDA_CAPABILITY", 90); }

int shared_optin(void) {
    int kib = capability() >= 90 ? 227 : capability() == 80 ? 163 : 99;
    return kib << 10;
}

size_t device_total(void) { return from_environment("NULL_CUDA_MEMORY", 80ull << 30); }

size_t device_used(int device) { return used[device]; }

MemorySums memory_sums(void) {
    size_t all = 0;
    for (int device = 0; device < DEVICES_MAX; ++device) all += used[device];
    return (MemorySums){all, pinned, peak};
}

static size_t place_of(const char *address) {
    size_t low = 0, high = range_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (ranges[middle].begin + ranges[middle].size <= address) low = middle + 1;
        else high = middle;
    }
    return low;
}

static void add_range(Range range) {
    if (range_count == range_room) {
        range_room = range_room ? 2 * range_room : 64;
        ranges = realloc(ranges, range_room * sizeof *ranges);
    }
    size_t place = place_of(range.begin);
    memmove(ranges + place + 1, ranges + place, (range_count - place) * sizeof *ranges);
    ranges[place] = range;
    ++range_count;
}

const Range *find_range(const void *address) {
    size_t place = place_of(address);
    bool inside = place < range_count && ranges[place].begin <= (const char *)address;
    return inside ? ranges + place : NULL;
}

static void *map(size_t size, int protection) {
    void *found = mmap(NULL, size, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return found == MAP_FAILED ? NULL : found;
}

void *take_device(size_t size, int device) {
    if (used[device] + size > device_total()) return NULL;
    void *begin = map(size, PROT_NONE);
    if (!begin) return NULL;
    add_range((Range){begin, size, ON_DEVICE, device});
    used[device] += size;
    size_t all = memory_sums().device_bytes;
    if (all > peak) peak = all;
    return begin;
}

void *take_pinned(size_t size) {
    void *begin = map(size, PROT_READ | PROT_WRITE);
    if (!begin) return NULL;
    add_range((Range){begin, size, PINNED, current_device});
    pinned += size;
    return begin;
}

bool add_registered(void *begin, size_t size) {
    if (find_range(begin)) return false;
    add_range((Range){begin, size, REGISTERED, current_device});
    pinned += size;
    return true;
}

bool give_back(void *begin, bool on_device) {
    const Range *range = find_range(begin);
    if (!range || range->begin != begin || (range->place == ON_DEVICE) != on_device) return false;
    if (range->place != REGISTERED) munmap(range->begin, range->size);
    if (on_device) used[range->device] -= range->size;
    else pinned -= range->size;
    size_t place = range - ranges;
    memmove(ranges + place, ranges + place + 1, (range_count - place - 1) * sizeof *ranges);
    --range_count;
    return true;
}
