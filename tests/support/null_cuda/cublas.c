// cuBLAS and cuBLASLt as far as torch's products need them: each is one launch on its stream.
#include "null_cuda.h"

#include <stdlib.h>
#include <string.h>

enum { CUBLAS_EXECUTION_FAILED = 13, LT_VERSION = 130100 };
static const double PRODUCT_MICROSECONDS = 10;

typedef struct {
    cudaStream_t stream;
    int math_mode, pointer_mode;
} Handle;

static int product(cudaStream_t handle, const char *name) {
    lock();
    Stream *stream = stream_of(handle);
    cudaError_t error = begin_work(stream);
    if (!error) add_work(stream, PRODUCT_MICROSECONDS);
    unlock();
    count_name(name);
    return error ? CUBLAS_EXECUTION_FAILED : 0;
}

EXPORT int cublasCreate_v2(Handle **made) {
    COUNT();
    *made = calloc(1, sizeof(Handle));
    lock();
    cudaError_t error = unsafe_call();  // allocates its workspace
    unlock();
    return error ? 1 : 0;
}

EXPORT int cublasDestroy_v2(Handle *handle) {
    free(handle);
    return 0;
}

EXPORT int cublasSetStream_v2(Handle *handle, cudaStream_t stream) {
    handle->stream = stream;
    return 0;
}

EXPORT int cublasSetWorkspace_v2(Handle *handle, void *workspace, size_t size) {
    (void)handle;
    const Range *range = find_range(workspace);
    if (size && (!range || range->place != ON_DEVICE))
        complain("a workspace that is not the device's");
    return 0;
}

EXPORT int cublasSetMathMode(Handle *handle, int mode) {
    handle->math_mode = mode;
    return 0;
}

EXPORT int cublasGetMathMode(Handle *handle, int *mode) {
    *mode = handle->math_mode;
    return 0;
}

EXPORT int cublasSetPointerMode_v2(Handle *handle, int mode) {
    handle->pointer_mode = mode;
    return 0;
}

EXPORT int cublasGetPointerMode_v2(Handle *handle, int *mode) {
    *mode = handle->pointer_mode;
    return 0;
}

EXPORT int cublasSetSmCountTarget(Handle *handle, int count) {
    (void)handle, (void)count;
    return 0;
}

#define PRODUCT(name) \
    EXPORT int name(Handle *handle) { return product(handle->stream, #name); }

PRODUCT(cublasGemmEx)
PRODUCT(cublasGemmStridedBatchedEx)
PRODUCT(cublasSgemmEx)
PRODUCT(cublasSgemm_v2)
PRODUCT(cublasSgemmStridedBatched)
PRODUCT(cublasSgemv_v2)
PRODUCT(cublasSdot_v2)
PRODUCT(cublasDotEx)
PRODUCT(cublasDgemm_v2)
PRODUCT(cublasDgemmStridedBatched)
PRODUCT(cublasDgemv_v2)
PRODUCT(cublasDdot_v2)

// cuBLASLt: descriptions are of no interest here.

typedef struct {
    uint64_t algo[8];
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
} Heuristic;

static int make(void **made) {
    *made = calloc(1, 64);
    return 0;
}

static int drop(void *made) {
    free(made);
    return 0;
}

static int ignore(void) { return 0; }

EXPORT int cublasLtMatmulDescCreate(void **made) { return make(made); }
EXPORT int cublasLtMatmulDescDestroy(void *made) { return drop(made); }
EXPORT int cublasLtMatmulDescSetAttribute(void) { return ignore(); }
EXPORT int cublasLtMatmulPreferenceCreate(void **made) { return make(made); }
EXPORT int cublasLtMatmulPreferenceDestroy(void *made) { return drop(made); }
EXPORT int cublasLtMatmulPreferenceSetAttribute(void) { return ignore(); }
EXPORT int cublasLtMatrixLayoutCreate(void **made) { return make(made); }
EXPORT int cublasLtMatrixLayoutDestroy(void *made) { return drop(made); }
EXPORT int cublasLtMatrixLayoutSetAttribute(void) { return ignore(); }
EXPORT size_t cublasLtGetVersion(void) { return LT_VERSION; }

EXPORT int cublasLtMatmulAlgoGetHeuristic(
    void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference, int wanted,
    Heuristic *results, int *found) {
    (void)handle, (void)operation, (void)a, (void)b, (void)c, (void)d, (void)preference;
    if (wanted < 1) return 7;
    memset(results, 0, sizeof *results);
    *found = 1;
    return 0;
}

EXPORT int cublasLtMatmul(
    void *handle, void *operation, const void *alpha, const void *a, void *a_layout, const void *b,
    void *b_layout, const void *beta, const void *c, void *c_layout, void *d, void *d_layout,
    const void *algo, void *workspace, size_t workspace_size, cudaStream_t stream) {
    (void)handle, (void)operation, (void)alpha, (void)a, (void)a_layout, (void)b, (void)b_layout;
    (void)beta, (void)c, (void)c_layout, (void)d, (void)d_layout, (void)algo, (void)workspace;
    (void)workspace_size;
    return product(stream, "cublasLtMatmul");
}
