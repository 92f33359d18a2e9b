// Declarations of a CUDA device that computes nothing, for all of its source files.
//
// Device memory is address space without access; copies from it contain one fixed pattern.
// Work on a stream ends as late as CUDA allows, so that a program that does not wait reads poison.
#pragma once

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if CUDART_VERSION < 13000 || CUDART_VERSION >= 14000
#error "the null CUDA device has the interface of CUDA 13"
#endif

#define EXPORT __attribute__((visibility("default")))

enum { SM_COUNT = 132, MAX_THREADS = 1024, WARP = 32, DEVICES_MAX = 8 };
enum { SHARED_STATIC = 48 << 10, SHARED_RESERVED = 1 << 10 };

// ledger.c: counts calls and broken rules.
typedef struct Counter {
    const char *name;
    uint64_t calls;
    struct Counter *next;
} Counter;

void count(Counter *counter);
void count_name(const char *name);
// Calls that wait for the device; must be called without the lock.
void report_sync(const char *name, size_t bytes);
// A rule of CUDA that is broken without an error code; kept for null_cuda_report().
void complain(const char *format, ...) __attribute__((format(printf, 1, 2)));
void lock(void);
void unlock(void);

#define COUNT()                              \
    do {                                     \
        static Counter counter = {__func__}; \
        lock();                              \
        count(&counter);                     \
        unlock();                            \
    } while (0)

// memory.c
typedef enum { ON_DEVICE, PINNED, REGISTERED } Place;

typedef struct {
    char *begin;
    size_t size;
    Place place;
    int device;
} Range;

typedef struct {
    size_t device_bytes, pinned_bytes, device_peak;
} MemorySums;

int device_count(void);
// 80, 89 or 90, and the shared memory that a block of such a device can ask for.
int capability(void);
int shared_optin(void);
size_t device_total(void);
size_t device_used(int device);
void *take_device(size_t size, int device);
void *take_pinned(size_t size);
bool add_registered(void *begin, size_t size);
// Frees a range; returns false if no range begins there.
bool give_back(void *begin, bool on_device);
// The range that an address is in; NULL: memory that CUDA does not know.
const Range *find_range(const void *address);
MemorySums memory_sums(void);

// streams.c, capture.c
typedef struct Stream Stream;
typedef struct Event Event;
typedef struct Graph Graph;
typedef struct Capture Capture;

extern _Thread_local int current_device;

Stream *stream_of(cudaStream_t handle);
cudaError_t begin_work(Stream *stream);
// Adds work that keeps the device busy for this long.
void add_work(Stream *stream, double microseconds);
cudaError_t copy_async(void *to, const void *from, size_t size, Stream *stream);
void complete_stream(Stream *stream);
void complete_all(void);
// Checks a call that CUDA calls potentially unsafe: it may be forbidden during captures.
cudaError_t unsafe_call(void);
cudaError_t device_wide_call(void);
cudaError_t invalidate(Capture *capture, cudaError_t error);
uint64_t live_streams(void), live_events(void), live_graphs(void);

// device.c
cudaError_t remember(cudaError_t error);

// kernels.c
// Checks a launch against the limits of the device.
cudaError_t check_launch(dim3 grid, dim3 block, size_t shared, size_t shared_allowed);
