// Streams, events, captures and graphs, as streams.c and capture.c both see them.
#pragma once

#include "null_cuda.h"

enum { CAPTURE_STREAMS = 64 };

typedef enum { WAIT, CHECK_SOURCE, FILL_TARGET, CALL } Kind;

typedef struct Work {
    Kind kind;
    uint64_t place;
    Stream *awaited;
    uint64_t awaited_place;
    unsigned char *memory;
    size_t size;
    uint64_t hash;
    void (*function)(void *);
    void *argument;
    struct Work *next;
} Work;

struct Stream {
    bool legacy, blocking;
    int device, priority;
    uint64_t issued, done;
    double clock;  // microseconds
    Work *first, *last;
    Capture *capture;
    uint64_t captured, joined;  // work within the capture, and how much of it others wait for
    Stream *next;
};

struct Event {
    Stream *stream;  // NULL: never recorded
    uint64_t place;
    double clock;
    uint64_t capture;
    uint64_t captured_place;
    bool timed;
    int queries;
};

struct Graph {
    uint64_t nodes;
    double microseconds;
};

struct Capture {
    uint64_t id;
    enum cudaStreamCaptureMode mode;
    Stream *origin, *streams[CAPTURE_STREAMS];
    int stream_count;
    bool broken;
    int thread;
    Graph *graph;
    Capture *next;
};

Capture *capture_by_id(uint64_t id);
int this_thread(void);
cudaError_t wait_captured(Stream *stream, const Event *event);
