// Stream capture with CUDA's rules, and graphs, which know how many nodes they have and no more.
#include "streams.h"

#include <stdlib.h>

static const double REPLAY_MICROSECONDS = 4;

static _Thread_local enum cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;
static _Thread_local int thread_number;
static int threads;
static Capture *captures;
static uint64_t capture_ids, graph_total;

uint64_t live_graphs(void) { return graph_total; }

cudaError_t invalidate(Capture *capture, cudaError_t error) {
    capture->broken = true;
    return error;
}

cudaError_t unsafe_call(void) {
    if (thread_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
    cudaError_t error = cudaSuccess;
    for (Capture *each = captures; each; each = each->next) {
        bool own = each->thread == this_thread() && each->mode != cudaStreamCaptureModeRelaxed;
        bool all = thread_mode == cudaStreamCaptureModeGlobal &&
                   each->mode == cudaStreamCaptureModeGlobal;
        if (own || all) error = invalidate(each, cudaErrorStreamCaptureUnsupported);
    }
    return error;
}

cudaError_t device_wide_call(void) {
    cudaError_t error = cudaSuccess;
    for (Capture *each = captures; each; each = each->next)
        error = invalidate(each, cudaErrorStreamCaptureUnsupported);
    return error;
}

cudaError_t begin_work(Stream *stream) {
    if (stream->capture && stream->capture->broken) return cudaErrorStreamCaptureInvalidated;
    if (!stream->legacy) return cudaSuccess;
    for (Capture *each = captures; each; each = each->next)
        for (int index = 0; index < each->stream_count; ++index)
            if (each->streams[index]->blocking)
                return invalidate(each, cudaErrorStreamCaptureImplicit);
    return cudaSuccess;
}

Capture *capture_by_id(uint64_t id) {
    Capture *each = captures;
    while (each && each->id != id) each = each->next;
    return each;
}

int this_thread(void) {
    if (!thread_number) thread_number = ++threads;
    return thread_number;
}

cudaError_t wait_captured(Stream *stream, const Event *event) {
    Capture *capture = capture_by_id(event->capture);
    if (!capture) return cudaErrorCapturedEvent;
    if (stream->legacy) return invalidate(capture, cudaErrorStreamCaptureImplicit);
    if (stream->capture && stream->capture != capture)
        return invalidate(capture, cudaErrorStreamCaptureMerge);
    if (!stream->capture) {
        if (capture->stream_count == CAPTURE_STREAMS) return cudaErrorNotSupported;
        stream->capture = capture;
        stream->captured = stream->joined = 0;
        capture->streams[capture->stream_count++] = stream;
    }
    if (event->stream->joined < event->captured_place)
        event->stream->joined = event->captured_place;
    return cudaSuccess;
}

EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    enum cudaStreamCaptureMode before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t handle, enum cudaStreamCaptureMode mode) {
    COUNT();
    lock();
    Stream *stream = stream_of(handle);
    cudaError_t error = stream->legacy ? cudaErrorStreamCaptureUnsupported
                        : stream->capture ? cudaErrorIllegalState
                                          : cudaSuccess;
    if (!error) {
        Capture *capture = calloc(1, sizeof *capture);
        *capture = (Capture){++capture_ids, mode, stream, {stream}, 1, false, this_thread(),
                             calloc(1, sizeof(Graph)), captures};
        captures = capture;
        stream->capture = capture;
        stream->captured = stream->joined = 0;
        ++graph_total;
    }
    unlock();
    return remember(error);
}

static cudaError_t end_capture(Capture *capture) {
    cudaError_t error = capture->broken ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
    if (!error && capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != this_thread())
        error = cudaErrorStreamCaptureWrongThread;
    for (int index = 0; index < capture->stream_count; ++index) {
        Stream *stream = capture->streams[index];
        if (!error && stream != capture->origin && stream->joined < stream->captured)
            error = cudaErrorStreamCaptureUnjoined;
        stream->capture = NULL;
    }
    Capture **link = &captures;
    while (*link != capture) link = &(*link)->next;
    *link = capture->next;
    return error;
}

EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *made) {
    COUNT();
    lock();
    Capture *capture = stream_of(handle)->capture;
    cudaError_t error = !capture ? cudaErrorIllegalState
                        : capture->origin != stream_of(handle) ? cudaErrorStreamCaptureUnmatched
                                                               : end_capture(capture);
    *made = error ? NULL : (cudaGraph_t)capture->graph;
    if (error && capture && stream_of(handle)->capture == NULL) --graph_total;
    unlock();
    return remember(error);
}

static enum cudaStreamCaptureStatus status_of(const Stream *stream) {
    if (!stream->capture) return cudaStreamCaptureStatusNone;
    return stream->capture->broken ? cudaStreamCaptureStatusInvalidated
                                   : cudaStreamCaptureStatusActive;
}

EXPORT cudaError_t cudaStreamIsCapturing(
    cudaStream_t handle, enum cudaStreamCaptureStatus *status) {
    lock();
    Stream *stream = stream_of(handle);
    cudaError_t error = begin_work(stream) == cudaErrorStreamCaptureImplicit
                            ? cudaErrorStreamCaptureImplicit
                            : cudaSuccess;
    *status = status_of(stream);
    unlock();
    return remember(error);
}

EXPORT cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t handle, enum cudaStreamCaptureStatus *status, unsigned long long *id,
    cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
    size_t *node_count) {
    lock();
    Stream *stream = stream_of(handle);
    *status = status_of(stream);
    if (id) *id = stream->capture ? stream->capture->id : 0;
    if (graph) *graph = stream->capture ? (cudaGraph_t)stream->capture->graph : NULL;
    if (nodes) *nodes = NULL;
    if (edges) *edges = NULL;
    if (node_count) *node_count = 0;
    unlock();
    return cudaSuccess;
}

EXPORT cudaError_t cudaGraphInstantiateWithFlags(
    cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long flags) {
    COUNT();
    (void)flags;
    if (!graph) return remember(cudaErrorInvalidValue);
    Graph *copy = malloc(sizeof *copy);
    lock();
    *copy = *(Graph *)graph;
    ++graph_total;
    unlock();
    *made = (cudaGraphExec_t)copy;
    return cudaSuccess;
}

static cudaError_t give_graph_back(void *graph) {
    lock();
    --graph_total;
    unlock();
    free(graph);
    return cudaSuccess;
}

EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return give_graph_back(graph); }
EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) { return give_graph_back(graph); }

EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t handle) {
    COUNT();
    lock();
    Stream *stream = stream_of(handle);
    cudaError_t error = begin_work(stream);
    if (!error) add_work(stream, REPLAY_MICROSECONDS + ((Graph *)graph)->microseconds);
    unlock();
    return remember(error);
}

EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    if (nodes) return remember(cudaErrorNotSupported);
    *count = ((Graph *)graph)->nodes;
    return cudaSuccess;
}
