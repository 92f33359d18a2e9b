// Functions that torch links against and this device lacks: each complains and returns an error.
// Without CUDA's headers, so that one form of function suits all.
#define EXPORT __attribute__((visibility("default")))
enum { NOT_SUPPORTED = 801, CUBLAS_NOT_SUPPORTED = 15 };
void complain(const char *format, ...);

#define REFUSE_AS(name, error)                               \
    EXPORT int name(void) {                                  \
        complain("%s is not there", #name);                  \
        return error;                                        \
    }
#define REFUSE(name) REFUSE_AS(name, NOT_SUPPORTED)

REFUSE(cudaDeviceGetDefaultMemPool)
REFUSE(cudaFreeAsync)
REFUSE(cudaGetSymbolAddress)
REFUSE(cudaGraphAddNode)
REFUSE(cudaGraphConditionalHandleCreate)
REFUSE(cudaGraphDebugDotPrint)
REFUSE(cudaGraphNodeGetDependencies)
REFUSE(cudaIpcCloseMemHandle)
REFUSE(cudaIpcGetEventHandle)
REFUSE(cudaIpcGetMemHandle)
REFUSE(cudaIpcOpenEventHandle)
REFUSE(cudaIpcOpenMemHandle)
REFUSE(cudaKernelSetAttributeForDevice)
REFUSE(cudaLibraryGetKernel)
REFUSE(cudaLibraryLoadData)
REFUSE(cudaLibraryUnload)
REFUSE(cudaMallocAsync)
REFUSE(cudaMemPoolGetAttribute)
REFUSE(cudaMemPoolSetAccess)
REFUSE(cudaMemPoolSetAttribute)
REFUSE(cudaMemPoolTrimTo)
REFUSE(cudaStreamAddCallback)
REFUSE(cudaStreamBeginCaptureToGraph)
REFUSE(cudaStreamUpdateCaptureDependencies)

REFUSE(cuGetExportTable)  // the real runtime asks for it: a function of it is missing here
REFUSE(cuGetProcAddress)
REFUSE(cuGetProcAddress_v2)
REFUSE(cuLaunchCooperativeKernel)
REFUSE(cuLinkAddData_v2)
REFUSE(cuLinkComplete)
REFUSE(cuLinkCreate_v2)
REFUSE(cuModuleLoad)
