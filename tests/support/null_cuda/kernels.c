// CUDA's runtime interface: kernels that were compiled into libraries, and their launches.
#define _GNU_SOURCE
#include "null_cuda.h"

#include <dlfcn.h>
#include <stdlib.h>

static const double LAUNCH_MICROSECONDS = 3;

typedef struct {
    const void *host;
    const char *name;
    int shared;
} Kernel;

static Kernel *kernels;
static size_t kernel_count, kernel_room;
static bool kernels_sorted;

typedef struct {
    dim3 grid, block;
    size_t shared;
    void *stream;
} Configuration;

static _Thread_local Configuration configuration;

EXPORT void **__cudaRegisterFatBinary(void *binary) { return (void **)binary; }
EXPORT void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
EXPORT void __cudaUnregisterFatBinary(void **handle) { (void)handle; }

EXPORT void __cudaRegisterFunction(
    void **handle, const char *host, char *device, const char *name, int limit, void *thread,
    void *place, void *block, void *grid, int *warp) {
    (void)handle, (void)device, (void)limit, (void)thread, (void)place;
    (void)block, (void)grid, (void)warp;
    lock();
    if (kernel_count == kernel_room) {
        kernel_room = kernel_room ? 2 * kernel_room : 1 << 14;
        kernels = realloc(kernels, kernel_room * sizeof *kernels);
    }
    kernels[kernel_count++] = (Kernel){host, name, SHARED_STATIC};
    kernels_sorted = false;
    unlock();
}

EXPORT void __cudaRegisterVar(
    void **handle, char *host, char *device, const char *name, int external, size_t size,
    int constant, int global) {
    (void)handle, (void)host, (void)device, (void)name;
    (void)external, (void)size, (void)constant, (void)global;
}

static int by_host(const void *left, const void *right) {
    const void *a = ((const Kernel *)left)->host, *b = ((const Kernel *)right)->host;
    return (a > b) - (a < b);
}

static Kernel *kernel_of(const void *host) {
    if (!kernels_sorted) qsort(kernels, kernel_count, sizeof *kernels, by_host);
    kernels_sorted = true;
    Kernel wanted = {host, NULL, 0};
    return bsearch(&wanted, kernels, kernel_count, sizeof *kernels, by_host);
}

EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    configuration = (Configuration){grid, block, shared, stream};
    return 0;
}

EXPORT cudaError_t __cudaPopCallConfiguration(
    dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = configuration.grid;
    *block = configuration.block;
    *shared = configuration.shared;
    *(void **)stream = configuration.stream;
    return cudaSuccess;
}

cudaError_t check_launch(dim3 grid, dim3 block, size_t shared, size_t allowed) {
    uint64_t threads = (uint64_t)block.x * block.y * block.z;
    bool grid_fits = grid.x && grid.x <= INT32_MAX && grid.y && grid.y <= 65535 && grid.z &&
                     grid.z <= 65535;
    bool block_fits = threads && threads <= MAX_THREADS && block.z <= 64;
    if (grid_fits && block_fits && shared <= allowed) return cudaSuccess;
    complain("a launch of grid (%u, %u, %u), block (%u, %u, %u), shared memory %zu of %zu", grid.x,
             grid.y, grid.z, block.x, block.y, block.z, shared, allowed);
    return shared > allowed ? cudaErrorInvalidValue : cudaErrorInvalidConfiguration;
}

static cudaError_t launch_kernel(
    const void *host, dim3 grid, dim3 block, size_t shared, cudaStream_t on) {
    lock();
    Kernel *kernel = kernel_of(host);
    cudaError_t error = kernel ? check_launch(grid, block, shared, kernel->shared)
                               : cudaErrorInvalidDeviceFunction;
    if (!error) error = begin_work(stream_of(on));
    if (!error) add_work(stream_of(on), LAUNCH_MICROSECONDS);
    if (!error) count_name(kernel->name);
    unlock();
    return remember(error);
}

EXPORT cudaError_t cudaLaunchKernel(
    const void *host, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t on) {
    COUNT();
    (void)arguments;
    return launch_kernel(host, grid, block, shared, on);
}

EXPORT cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *host) {
    *kernel = (cudaKernel_t)host;
    return cudaSuccess;
}

EXPORT cudaError_t __cudaLaunchKernel(
    cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t on) {
    return cudaLaunchKernel(kernel, grid, block, arguments, shared, on);
}

EXPORT cudaError_t cudaLaunchKernelExC(
    const cudaLaunchConfig_t *config, const void *host, void **arguments) {
    return cudaLaunchKernel(host, config->gridDim, config->blockDim, arguments,
                            config->dynamicSmemBytes, config->stream);
}

EXPORT cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *host) {
    (void)host;
    *found = (struct cudaFuncAttributes){
        .maxThreadsPerBlock = MAX_THREADS,
        .numRegs = 64,
        .ptxVersion = capability() / 10 * 10,
        .binaryVersion = capability() / 10 * 10,
        .maxDynamicSharedSizeBytes = SHARED_STATIC,
    };
    return cudaSuccess;
}

EXPORT cudaError_t cudaFuncSetAttribute(const void *host, enum cudaFuncAttribute name, int value) {
    lock();
    Kernel *kernel = kernel_of(host);
    bool shared = kernel && name == cudaFuncAttributeMaxDynamicSharedMemorySize;
    if (shared && value <= shared_optin()) kernel->shared = value;
    unlock();
    return shared && value > shared_optin() ? remember(cudaErrorInvalidValue) : cudaSuccess;
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int *blocks, const void *host, int threads, size_t shared, unsigned flags) {
    (void)host, (void)shared, (void)flags;
    *blocks = threads > 0 && threads <= 512 ? 4 : 2;
    return cudaSuccess;
}

EXPORT cudaError_t cudaGetDriverEntryPointByVersion(
    const char *name, void **function, unsigned version, unsigned long long flags,
    enum cudaDriverEntryPointQueryResult *status) {
    (void)version, (void)flags;
    *function = dlsym(RTLD_DEFAULT, name);
    if (status)
        *status = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

EXPORT cudaError_t cudaProfilerStart(void) { return cudaSuccess; }
EXPORT cudaError_t cudaProfilerStop(void) { return cudaSuccess; }
