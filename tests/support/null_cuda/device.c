// CUDA's runtime interface: what the device is like, and errors.
#include "null_cuda.h"

#include <stdio.h>

static _Thread_local cudaError_t last_error;

cudaError_t remember(cudaError_t error) {
    if (error != cudaSuccess && error != cudaErrorNotReady) last_error = error;
    return error;
}

EXPORT cudaError_t cudaGetDeviceCount(int *count) {
    *count = device_count();
    return *count ? cudaSuccess : remember(cudaErrorNoDevice);
}

EXPORT cudaError_t cudaGetDevice(int *device) {
    *device = current_device;
    return cudaSuccess;
}

EXPORT cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= device_count()) return remember(cudaErrorInvalidDevice);
    current_device = device;
    return cudaSuccess;
}

EXPORT cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

EXPORT cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

EXPORT cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *prop, int device) {
    *prop = (struct cudaDeviceProp){
        .name = "NVIDIA H100 80GB HBM3 (null)",
        .totalGlobalMem = device_total(),
        .sharedMemPerBlock = SHARED_STATIC,
        .regsPerBlock = 65536,
        .warpSize = WARP,
        .memPitch = INT32_MAX,
        .maxThreadsPerBlock = MAX_THREADS,
        .maxThreadsDim = {1024, 1024, 64},
        .maxGridSize = {INT32_MAX, 65535, 65535},
        .totalConstMem = 65536,
        .major = capability() / 10,
        .minor = capability() % 10,
        .textureAlignment = 512,
        .texturePitchAlignment = 32,
        .multiProcessorCount = SM_COUNT,
        .canMapHostMemory = 1,
        .concurrentKernels = 1,
        .ECCEnabled = 1,
        .pciBusID = 1 + device,
        .asyncEngineCount = 3,
        .unifiedAddressing = 1,
        .memoryBusWidth = 5120,
        .l2CacheSize = 50 << 20,
        .maxThreadsPerMultiProcessor = 2048,
        .streamPrioritiesSupported = 1,
        .sharedMemPerMultiprocessor = shared_optin() + SHARED_RESERVED,
        .regsPerMultiprocessor = 65536,
        .managedMemory = 1,
        .cooperativeLaunch = 1,
        .sharedMemPerBlockOptin = shared_optin(),
        .maxBlocksPerMultiProcessor = 32,
        .reservedSharedMemPerBlock = SHARED_RESERVED,
        .hostRegisterSupported = 1,
        .memoryPoolsSupported = 1,
        .clusterLaunch = 1,
    };
    snprintf(prop->uuid.bytes, sizeof prop->uuid.bytes, "null-%d", device);
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr name, int device) {
    struct cudaDeviceProp prop;
    cudaGetDeviceProperties(&prop, device);
    switch (name) {
        case cudaDevAttrMaxThreadsPerBlock: *value = MAX_THREADS; break;
        case cudaDevAttrMaxBlockDimX: *value = prop.maxThreadsDim[0]; break;
        case cudaDevAttrMaxBlockDimY: *value = prop.maxThreadsDim[1]; break;
        case cudaDevAttrMaxBlockDimZ: *value = prop.maxThreadsDim[2]; break;
        case cudaDevAttrMaxGridDimX: *value = prop.maxGridSize[0]; break;
        case cudaDevAttrMaxGridDimY: *value = prop.maxGridSize[1]; break;
        case cudaDevAttrMaxGridDimZ: *value = prop.maxGridSize[2]; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *value = SHARED_STATIC; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = shared_optin(); break;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
            *value = shared_optin() + SHARED_RESERVED;
            break;
        case cudaDevAttrReservedSharedMemoryPerBlock: *value = SHARED_RESERVED; break;
        case cudaDevAttrMaxRegistersPerBlock:
        case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 65536; break;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
        case cudaDevAttrMaxBlocksPerMultiprocessor: *value = 32; break;
        case cudaDevAttrWarpSize: *value = WARP; break;
        case cudaDevAttrMultiProcessorCount: *value = SM_COUNT; break;
        case cudaDevAttrComputeCapabilityMajor: *value = capability() / 10; break;
        case cudaDevAttrComputeCapabilityMinor: *value = capability() % 10; break;
        case cudaDevAttrClockRate: *value = 1980000; break;
        case cudaDevAttrMemoryClockRate: *value = 2619000; break;
        case cudaDevAttrGlobalMemoryBusWidth: *value = prop.memoryBusWidth; break;
        case cudaDevAttrL2CacheSize: *value = prop.l2CacheSize; break;
        case cudaDevAttrIntegrated: *value = 0; break;
        default: *value = 1;
    }
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int device) {
    snprintf(text, length, "0000:%02x:00.0", 1 + device);
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    *can = device != peer;
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
    (void)peer, (void)flags;
    return cudaSuccess;
}

EXPORT cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

EXPORT cudaError_t cudaPeekAtLastError(void) { return last_error; }

EXPORT const char *cudaGetErrorName(cudaError_t error) {
    static _Thread_local char name[32];
    snprintf(name, sizeof name, "cudaError%d", error);
    return name;
}

EXPORT const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case cudaSuccess: return "no error";
        case cudaErrorInvalidValue: return "invalid argument";
        case cudaErrorMemoryAllocation: return "out of memory";
        case cudaErrorInvalidConfiguration: return "invalid configuration argument";
        case cudaErrorNotReady: return "device not ready";
        case cudaErrorNotSupported: return "the null CUDA device does not have this";
        case cudaErrorStreamCaptureUnsupported:
            return "operation not permitted when stream is capturing";
        case cudaErrorStreamCaptureInvalidated:
            return "operation failed due to a previous error during capture";
        case cudaErrorStreamCaptureIsolation:
            return "dependency created on uncaptured work in another stream";
        case cudaErrorStreamCaptureUnjoined:
            return "capturing stream has unjoined work";
        case cudaErrorStreamCaptureImplicit:
            return "operation would make the legacy stream depend on a capturing blocking stream";
        case cudaErrorCapturedEvent:
            return "operation not permitted on an event last recorded in a capturing stream";
        default: return cudaGetErrorName(error);
    }
}
