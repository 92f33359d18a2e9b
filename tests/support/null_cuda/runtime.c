// CUDA's runtime interface: memory and copies.
#include "null_cuda.h"

static const double FILL_MICROSECONDS = 3;

static cudaError_t allocate(void **made, size_t size, void *(*take)(size_t)) {
    lock();
    cudaError_t error = unsafe_call();
    *made = error || size == 0 ? NULL : take(size);
    if (!error && size && !*made) error = cudaErrorMemoryAllocation;
    unlock();
    return remember(error);
}

static void *take_here(size_t size) { return take_device(size, current_device); }

EXPORT cudaError_t cudaMalloc(void **made, size_t size) {
    COUNT();
    return allocate(made, size, take_here);
}

EXPORT cudaError_t cudaHostAlloc(void **made, size_t size, unsigned flags) {
    COUNT();
    (void)flags;
    return allocate(made, size, take_pinned);
}

// Waits for the device, as the real ones do.
static cudaError_t give(void *begin, bool on_device, const char *name) {
    if (!begin) return cudaSuccess;
    report_sync(name, 0);
    lock();
    cudaError_t error = unsafe_call();
    if (!error) complete_all();
    if (!error && !give_back(begin, on_device)) error = cudaErrorInvalidValue;
    unlock();
    return remember(error);
}

EXPORT cudaError_t cudaFree(void *begin) {
    COUNT();
    return give(begin, true, __func__);
}

EXPORT cudaError_t cudaFreeHost(void *begin) {
    COUNT();
    return give(begin, false, __func__);
}

EXPORT cudaError_t cudaHostUnregister(void *begin) {
    COUNT();
    return give(begin, false, __func__);
}

EXPORT cudaError_t cudaHostRegister(void *begin, size_t size, unsigned flags) {
    COUNT();
    (void)flags;
    lock();
    bool added = add_registered(begin, size);
    unlock();
    return added ? cudaSuccess : remember(cudaErrorHostMemoryAlreadyRegistered);
}

EXPORT cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
    COUNT();
    lock();
    *total = device_total();
    *available = *total - device_used(current_device);
    unlock();
    return cudaSuccess;
}

EXPORT cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *at) {
    lock();
    const Range *range = find_range(at);
    *found = (struct cudaPointerAttributes){.type = cudaMemoryTypeUnregistered, .device = -2};
    if (range) {
        bool on_device = range->place == ON_DEVICE;
        found->type = on_device ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
        found->device = range->device;
        found->devicePointer = (void *)at;
        found->hostPointer = on_device ? NULL : (void *)at;
    }
    unlock();
    return cudaSuccess;
}

static bool waits(void *to, const void *from) {
    lock();
    const Range *target = find_range(to), *source = find_range(from);
    unlock();
    return !target && source && source->place == ON_DEVICE;
}

EXPORT cudaError_t cudaMemcpyAsync(
    void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t handle) {
    COUNT();
    (void)kind;
    if (waits(to, from)) {
        count_name("cudaMemcpyAsync that waits");
        report_sync("cudaMemcpyAsync to pageable memory", size);
    }
    lock();
    cudaError_t error = copy_async(to, from, size, stream_of(handle));
    unlock();
    return remember(error);
}

EXPORT cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    COUNT();
    (void)kind;
    report_sync(__func__, size);
    lock();
    cudaError_t error = unsafe_call();
    if (!error) error = copy_async(to, from, size, stream_of(NULL));
    if (!error) complete_stream(stream_of(NULL));
    unlock();
    return remember(error);
}

EXPORT cudaError_t cudaMemcpyPeerAsync(
    void *to, int to_device, const void *from, int from_device, size_t size, cudaStream_t handle) {
    (void)to_device, (void)from_device;
    return cudaMemcpyAsync(to, from, size, cudaMemcpyDefault, handle);
}

EXPORT cudaError_t cudaMemcpyToSymbol(
    const void *symbol, const void *from, size_t size, size_t offset, enum cudaMemcpyKind kind) {
    COUNT();
    (void)symbol, (void)from, (void)size, (void)offset, (void)kind;
    return cudaSuccess;
}

static cudaError_t fill(Stream *stream) {
    cudaError_t error = begin_work(stream);
    if (!error) add_work(stream, FILL_MICROSECONDS);
    return error;
}

EXPORT cudaError_t cudaMemsetAsync(void *at, int value, size_t size, cudaStream_t handle) {
    COUNT();
    (void)value;
    lock();
    const Range *range = find_range(at);
    bool fits = range && range->begin + range->size >= (char *)at + size;
    cudaError_t error = size && !fits ? cudaErrorInvalidValue : fill(stream_of(handle));
    unlock();
    return remember(error);
}

EXPORT cudaError_t cudaMemset(void *at, int value, size_t size) {
    return cudaMemsetAsync(at, value, size, NULL);
}
