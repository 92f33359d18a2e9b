// Streams and events. The work of a stream is done only when a thread waits for it.
#include "streams.h"

#include <stdlib.h>
#include <string.h>

enum { QUERIES_UNTIL_READY = 2 };
static const double COPY_MICROSECONDS = 2, BYTES_PER_MICROSECOND = 2e6;

_Thread_local int current_device;
static Stream legacy_streams[DEVICES_MAX], *streams;
static uint64_t stream_total, event_total;
static uint64_t answer;

uint64_t live_streams(void) { return stream_total; }
uint64_t live_events(void) { return event_total; }

// The value of each eight bytes that are copied from the device.
EXPORT void null_cuda_set_answer(uint64_t word) { answer = word; }

Stream *stream_of(cudaStream_t handle) {
    if (handle != NULL && handle != cudaStreamLegacy && handle != cudaStreamPerThread)
        return (Stream *)handle;
    Stream *stream = &legacy_streams[current_device];
    stream->legacy = stream->blocking = true;
    stream->device = current_device;
    return stream;
}

static uint64_t hash_of(const unsigned char *memory, size_t size) {
    uint64_t hash = 1469598103934665603ull;
    size_t step = size > (1 << 20) ? 509 : 1;
    for (size_t index = 0; index < size; index += step)
        hash = (hash ^ memory[index]) * 1099511628211ull;
    return hash;
}

static void fill(unsigned char *memory, size_t size) {
    for (size_t index = 0; index < size; ++index)
        memory[index] = (unsigned char)(answer >> (8 * (index % 8)));
}

static void complete(Stream *stream, uint64_t place);

static void carry_out(const Work *work) {
    if (work->kind == WAIT) complete(work->awaited, work->awaited_place);
    if (work->kind == FILL_TARGET) fill(work->memory, work->size);
    if (work->kind == CALL) work->function(work->argument);
    if (work->kind == CHECK_SOURCE && hash_of(work->memory, work->size) != work->hash)
        complain("%zu bytes of pinned memory changed before they were copied", work->size);
}

static void complete(Stream *stream, uint64_t place) {
    if (stream->done >= place) return;
    stream->done = place;
    while (stream->first && stream->first->place <= place) {
        Work *work = stream->first;
        stream->first = work->next;
        if (!stream->first) stream->last = NULL;
        carry_out(work);
        free(work);
    }
}

void complete_stream(Stream *stream) {
    complete(stream, stream->issued);
    if (!stream->legacy) return;
    for (Stream *each = streams; each; each = each->next)
        if (each->blocking) complete(each, each->issued);
}

void complete_all(void) {
    for (int device = 0; device < DEVICES_MAX; ++device) complete_stream(&legacy_streams[device]);
    for (Stream *each = streams; each; each = each->next) complete_stream(each);
}

void add_work(Stream *stream, double microseconds) {
    if (stream->capture) {
        ++stream->captured;
        ++stream->capture->graph->nodes;
        stream->capture->graph->microseconds += microseconds;
        return;
    }
    ++stream->issued;
    stream->clock += microseconds;
}

static Work *enqueue(Stream *stream, Kind kind, double microseconds) {
    add_work(stream, microseconds);
    Work *work = calloc(1, sizeof *work);
    work->kind = kind;
    work->place = stream->issued;
    if (stream->last) stream->last->next = work;
    else stream->first = work;
    stream->last = work;
    return work;
}

static void enqueue_memory(Stream *stream, Kind kind, void *memory, size_t size, double time) {
    Work *work = enqueue(stream, kind, time);
    work->memory = memory;
    work->size = size;
    if (kind == CHECK_SOURCE) work->hash = hash_of(memory, size);
    if (kind == FILL_TARGET) memset(memory, 0xff, size);  // nobody may read it yet
}

cudaError_t copy_async(void *to, const void *from, size_t size, Stream *stream) {
    cudaError_t error = begin_work(stream);
    if (error || size == 0) return error;
    const Range *target = find_range(to), *source = find_range(from);
    bool reads = !target || target->place != ON_DEVICE;
    bool writes = !source || source->place != ON_DEVICE;
    double time = COPY_MICROSECONDS + size / BYTES_PER_MICROSECOND;
    if (stream->capture && (!target || !source))
        return invalidate(stream->capture, cudaErrorStreamCaptureUnsupported);
    if (stream->capture || (!reads && !writes)) {
        add_work(stream, time);
    } else if (reads && writes) {
        complete_stream(stream);
        memmove(to, from, size);
        add_work(stream, time);
    } else if (reads && !target) {
        add_work(stream, time);
        complete_stream(stream);
        fill(to, size);
    } else if (reads) {
        enqueue_memory(stream, FILL_TARGET, to, size, time);
    } else if (source) {
        enqueue_memory(stream, CHECK_SOURCE, (void *)from, size, time);
    } else {
        add_work(stream, time);  // taken over before the call returns
    }
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t *made, unsigned flags, int priority) {
    COUNT();
    Stream *stream = calloc(1, sizeof *stream);
    lock();
    stream->blocking = !(flags & cudaStreamNonBlocking);
    stream->device = current_device;
    stream->priority = priority;
    stream->next = streams;
    streams = stream;
    ++stream_total;
    unlock();
    *made = (cudaStream_t)stream;
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t *made, unsigned flags) {
    return cudaStreamCreateWithPriority(made, flags, 0);
}

EXPORT cudaError_t cudaStreamCreate(cudaStream_t *made) {
    return cudaStreamCreateWithPriority(made, 0, 0);
}

// Kept, as events may still name it.
EXPORT cudaError_t cudaStreamDestroy(cudaStream_t handle) {
    COUNT();
    lock();
    complete_stream(stream_of(handle));
    --stream_total;
    unlock();
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t handle, int *priority) {
    *priority = stream_of(handle)->priority;
    return cudaSuccess;
}

static cudaError_t waiting_call(Stream *stream) {
    if (stream->capture) return invalidate(stream->capture, cudaErrorStreamCaptureUnsupported);
    return unsafe_call();
}

EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    COUNT();
    report_sync(__func__, 0);
    lock();
    Stream *stream = stream_of(handle);
    cudaError_t error = waiting_call(stream);
    if (!error) complete_stream(stream);
    unlock();
    return remember(error);
}

EXPORT cudaError_t cudaStreamQuery(cudaStream_t handle) {
    COUNT();
    lock();
    Stream *stream = stream_of(handle);
    cudaError_t error = waiting_call(stream);
    if (!error) complete_stream(stream);
    unlock();
    return remember(error);
}

EXPORT cudaError_t cudaDeviceSynchronize(void) {
    COUNT();
    report_sync(__func__, 0);
    lock();
    cudaError_t error = device_wide_call();
    if (!error) complete_all();
    unlock();
    return remember(error);
}

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *made, unsigned flags) {
    COUNT();
    Event *event = calloc(1, sizeof *event);
    event->timed = !(flags & cudaEventDisableTiming);
    lock();
    ++event_total;
    unlock();
    *made = (cudaEvent_t)event;
    return cudaSuccess;
}

EXPORT cudaError_t cudaEventCreate(cudaEvent_t *made) { return cudaEventCreateWithFlags(made, 0); }

EXPORT cudaError_t cudaEventDestroy(cudaEvent_t handle) {
    COUNT();
    lock();
    --event_total;
    unlock();
    free(handle);
    return cudaSuccess;
}

static void record(Event *event, Stream *stream) {
    event->stream = stream;
    event->place = stream->issued;
    event->clock = stream->clock;
    event->queries = 0;
    event->capture = stream->capture ? stream->capture->id : 0;
    event->captured_place = stream->captured;
}

EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t on, unsigned flags) {
    COUNT();
    (void)flags;
    lock();
    Stream *stream = stream_of(on);
    cudaError_t error = begin_work(stream);
    if (!error) record((Event *)handle, stream);
    unlock();
    return remember(error);
}

EXPORT cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t on) {
    return cudaEventRecordWithFlags(handle, on, 0);
}

// Checks a call on an event: for one that was recorded in a capture, the call breaks the capture.
static cudaError_t event_call(Event *event) {
    if (event->capture) {
        Capture *capture = capture_by_id(event->capture);
        return capture ? invalidate(capture, cudaErrorCapturedEvent) : cudaErrorCapturedEvent;
    }
    return unsafe_call();
}

EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
    COUNT();
    report_sync(__func__, 0);
    Event *event = (Event *)handle;
    lock();
    cudaError_t error = event_call(event);
    if (!error && event->stream) complete(event->stream, event->place);
    unlock();
    return remember(error);
}

EXPORT cudaError_t cudaEventQuery(cudaEvent_t handle) {
    COUNT();
    Event *event = (Event *)handle;
    lock();
    cudaError_t error = event_call(event);
    if (!error && event->stream && event->stream->done < event->place) {
        if (++event->queries > QUERIES_UNTIL_READY) complete(event->stream, event->place);
        else error = cudaErrorNotReady;
    }
    unlock();
    return remember(error);
}

EXPORT cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) {
    COUNT();
    const Event *begin = (Event *)from, *end = (Event *)to;
    if (!begin->stream || !end->stream || !begin->timed || !end->timed || begin->capture)
        return remember(cudaErrorInvalidResourceHandle);
    if (begin->stream->done < begin->place || end->stream->done < end->place)
        return remember(cudaErrorNotReady);
    *milliseconds = (float)((end->clock - begin->clock) / 1000);
    return cudaSuccess;
}

static cudaError_t wait_event(Stream *stream, const Event *event) {
    cudaError_t error = begin_work(stream);
    if (error || !event->stream) return error;
    if (event->capture) return wait_captured(stream, event);
    if (stream->capture) return invalidate(stream->capture, cudaErrorStreamCaptureIsolation);
    if (event->stream == stream) return cudaSuccess;
    Work *work = enqueue(stream, WAIT, 0);
    work->awaited = event->stream;
    work->awaited_place = event->place;
    if (stream->clock < event->clock) stream->clock = event->clock;
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned flags) {
    COUNT();
    (void)flags;
    lock();
    cudaError_t error = wait_event(stream_of(handle), (Event *)event);
    unlock();
    return remember(error);
}

EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void *argument) {
    COUNT();
    lock();
    Stream *stream = stream_of(handle);
    cudaError_t error = begin_work(stream);
    if (!error && stream->capture) {
        add_work(stream, 1);
    } else if (!error) {
        Work *work = enqueue(stream, CALL, 1);
        work->function = function;
        work->argument = argument;
    }
    unlock();
    return remember(error);
}
