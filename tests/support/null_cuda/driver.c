// CUDA's driver interface, as far as Triton and torch call it themselves.
#define _GNU_SOURCE
#include "null_cuda.h"

#include <cuda.h>
#include <elf.h>
#include <stdlib.h>
#include <string.h>

enum { CUBIN_SM_SHIFT = 8 };
static const double LAUNCH_MICROSECONDS = 3;
static int context_word;
static _Thread_local CUcontext current_context;

typedef struct {
    char *name;
    int shared;
} Function;

EXPORT CUresult cuInit(unsigned flags) {
    (void)flags;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDriverGetVersion(int *version) {
    *version = CUDA_VERSION;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = cudaGetErrorString((cudaError_t)error);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGet(CUdevice *device, int number) {
    *device = number;
    return number < device_count() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

EXPORT CUresult cuDeviceGetCount(int *count) {
    *count = device_count();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute name, CUdevice device) {
    return (CUresult)cudaDeviceGetAttribute(value, (enum cudaDeviceAttr)name, device);
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *made, CUdevice device) {
    (void)device;
    *made = (CUcontext)&context_word;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    (void)device;
    *flags = 0;
    *active = 1;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetCurrent(CUcontext *found) {
    *found = current_context ? current_context : (CUcontext)&context_word;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetCurrent(CUcontext wanted) {
    current_context = wanted;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
    (void)limit;
    *value = 1 << 20;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetLimit(CUlimit limit, size_t value) {
    (void)limit, (void)value;
    return CUDA_SUCCESS;
}

// Whether it is machine code for this device.
static bool fits(const void *image) {
    const Elf64_Ehdr *header = image;
    bool cubin = memcmp(header->e_ident, ELFMAG, SELFMAG) == 0 && header->e_machine == EM_CUDA;
    unsigned sm = (unsigned)capability();
    unsigned low = header->e_flags & 0xff, high = (header->e_flags >> CUBIN_SM_SHIFT) & 0xff;
    return cubin && (low == sm || high == sm);
}

EXPORT CUresult cuModuleLoadData(CUmodule *made, const void *image) {
    COUNT();
    if (!fits(image)) {
        complain("a module that is no cubin for sm_%d", capability());
        return CUDA_ERROR_NO_BINARY_FOR_GPU;
    }
    lock();
    cudaError_t error = unsafe_call();
    unlock();
    *made = (CUmodule)&context_word;
    return (CUresult)error;
}

EXPORT CUresult cuModuleLoadDataEx(
    CUmodule *made, const void *image, unsigned count, CUjit_option *options, void **values) {
    (void)count, (void)options, (void)values;
    return cuModuleLoadData(made, image);
}

EXPORT CUresult cuModuleUnload(CUmodule module) {
    (void)module;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleGetFunction(CUfunction *made, CUmodule module, const char *name) {
    (void)module;
    Function *function = calloc(1, sizeof *function);
    *function = (Function){strdup(name), SHARED_STATIC};
    *made = (CUfunction)function;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncGetAttribute(int *value, CUfunction_attribute name, CUfunction function) {
    (void)function;
    *value = 0;
    if (name == CU_FUNC_ATTRIBUTE_NUM_REGS) *value = 64;
    if (name == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK) *value = MAX_THREADS;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute name, int value) {
    if (name != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return CUDA_SUCCESS;
    if (value > shared_optin()) return CUDA_ERROR_INVALID_VALUE;
    ((Function *)function)->shared = value;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) {
    (void)function, (void)config;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(
    int *blocks, CUfunction function, int threads, size_t shared) {
    return (CUresult)cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        blocks, function, threads, shared, 0);
}

EXPORT CUresult cuOccupancyMaxActiveClusters(
    int *clusters, CUfunction function, const CUlaunchConfig *config) {
    (void)function, (void)config;
    *clusters = SM_COUNT;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuLaunchKernelEx(
    const CUlaunchConfig *config, CUfunction handle, void **arguments, void **extra) {
    COUNT();
    (void)arguments, (void)extra;
    const Function *function = (Function *)handle;
    dim3 grid = {config->gridDimX, config->gridDimY, config->gridDimZ};
    dim3 block = {config->blockDimX, config->blockDimY, config->blockDimZ};
    lock();
    Stream *stream = stream_of((cudaStream_t)config->hStream);
    cudaError_t error = check_launch(grid, block, config->sharedMemBytes, function->shared);
    if (!error) error = begin_work(stream);
    if (!error) add_work(stream, LAUNCH_MICROSECONDS);
    if (!error) count_name(function->name);
    unlock();
    return (CUresult)error;
}

EXPORT CUresult cuLaunchKernel(
    CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
    unsigned block_y, unsigned block_z, unsigned shared, CUstream stream, void **arguments,
    void **extra) {
    CUlaunchConfig config = {grid_x,  grid_y, grid_z, block_x, block_y,
                             block_z, shared, stream, NULL,    0};
    return cuLaunchKernelEx(&config, function, arguments, extra);
}

EXPORT CUresult cuPointerGetAttribute(void *value, CUpointer_attribute name, CUdeviceptr at) {
    lock();
    const Range *range = find_range((void *)at);
    unlock();
    if (!range) return CUDA_ERROR_INVALID_VALUE;
    if (name == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *(CUdeviceptr *)value = at;
    else if (name == CU_POINTER_ATTRIBUTE_CONTEXT) *(CUcontext *)value = (CUcontext)&context_word;
    else if (name == CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
        *(unsigned *)value = range->place == ON_DEVICE ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
    else return CUDA_ERROR_NOT_SUPPORTED;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuTensorMapEncodeTiled(
    CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
    const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
    const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
    CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill out_of_bounds) {
    (void)type, (void)sizes, (void)steps, (void)interleave, (void)swizzle, (void)promotion;
    (void)out_of_bounds;
    memset(map, 0, sizeof *map);
    bool fits = rank >= 1 && rank <= 5 && (uintptr_t)address % 16 == 0;
    for (cuuint32_t index = 0; fits && index < rank; ++index) fits = box[index] <= 256;
    for (cuuint32_t index = 0; fits && index + 1 < rank; ++index) fits = strides[index] % 16 == 0;
    return fits ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
