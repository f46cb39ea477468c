/* A CUDA driver without a device, as far as FFmpeg needs one: its "device memory" is host memory.
 *
 * Tests load it by its soname before FFmpeg does, and read or set the variables below by ctypes. Compiled with
 * -DOLD, it lacks one function that FFmpeg calls and one that this library does, as the driver of an old CUDA does. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* FFmpeg calls from many threads. */
#define ADD(counter, number) __atomic_add_fetch(&(counter), number, __ATOMIC_SEQ_CST)

enum { OK = 0, OUT_OF_MEMORY = 2, INVALID_CONTEXT = 201, UNKNOWN = 999 };

/* Settings. */
long long fake_cuda_memory = 1LL << 40; /* bytes that the device has */
long long fake_cuda_gone = 0;           /* what each call returns, once the device is gone */
long long fake_cuda_version = 13000;
long long fake_cuda_devices = 1;

/* Counters. */
long long fake_cuda_allocations = 0, fake_cuda_frees = 0, fake_cuda_used = 0, fake_cuda_copies = 0;

static char primary; /* its address is the primary context */

typedef struct { size_t bytes; char padding[504]; } Header; /* memory begins on 512 bytes, as a device's does */

static const struct { int code; const char *name, *words; } ERRORS[] = {
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

static const void *described(int code, int words)
{
    for (size_t i = 0; i < sizeof ERRORS / sizeof *ERRORS; i++)
        if (ERRORS[i].code == code) return words ? ERRORS[i].words : ERRORS[i].name;
    return "CUDA_ERROR_OTHER";
}

int cuGetErrorName(int code, const char **text) { *text = described(code, 0); return OK; }
int cuGetErrorString(int code, const char **text) { *text = described(code, 1); return OK; }

int cuInit(unsigned flags) { return (int)fake_cuda_gone; }
int cuDriverGetVersion(int *version) { *version = (int)fake_cuda_version; return OK; }
int cuDeviceGetCount(int *count) { *count = (int)fake_cuda_devices; return (int)fake_cuda_gone; }

int cuDeviceGet(int *device, int ordinal)
{
    *device = ordinal;
    return ordinal < fake_cuda_devices ? (int)fake_cuda_gone : 101;
}

int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    *value = attribute == 14 ? 512 : 0; /* 14 is the alignment of textures, which FFmpeg aligns rows to */
    return (int)fake_cuda_gone;
}

int cuCtxGetCurrent(void **context) { *context = &primary; return (int)fake_cuda_gone; }
int cuCtxPushCurrent_v2(void *context) { return context == &primary ? (int)fake_cuda_gone : INVALID_CONTEXT; }
int cuCtxPopCurrent_v2(void **context) { if (context) *context = &primary; return (int)fake_cuda_gone; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &primary; return (int)fake_cuda_gone; }

int cuMemAlloc_v2(unsigned long long *address, size_t bytes)
{
    Header *header;
    if (fake_cuda_gone) return (int)fake_cuda_gone;
    if (fake_cuda_used + (long long)bytes > fake_cuda_memory) return OUT_OF_MEMORY;
    header = aligned_alloc(512, sizeof *header + (bytes + 511) / 512 * 512);
    header->bytes = bytes;
    memset(header + 1, 0xEE, bytes);
    ADD(fake_cuda_used, (long long)bytes);
    ADD(fake_cuda_allocations, 1);
    *address = (unsigned long long)(uintptr_t)(header + 1);
    return OK;
}

int cuMemFree_v2(unsigned long long address)
{
    Header *header = (Header *)(uintptr_t)address - 1;
    ADD(fake_cuda_used, -(long long)header->bytes);
    ADD(fake_cuda_frees, 1);
    memset(header + 1, 0xDD, header->bytes); /* whoever still reads it shall see */
    free(header);
    return (int)fake_cuda_gone;
}

typedef struct {
    size_t x, y;
    int kind; /* 2: device memory */
    void *host;
    unsigned long long device;
    void *array;
    size_t pitch;
} Side;

typedef struct { Side from, to; size_t bytes, rows; } Copy;

int cuMemcpy2DAsync_v2(const Copy *copy, void *stream)
{
    const char *from = copy->from.kind == 2 ? (char *)(uintptr_t)copy->from.device : copy->from.host;
    char *to = copy->to.kind == 2 ? (char *)(uintptr_t)copy->to.device : copy->to.host;
    if (fake_cuda_gone) return (int)fake_cuda_gone;
    for (size_t row = 0; row < copy->rows; row++)
        memcpy(to + row * copy->to.pitch, from + row * copy->from.pitch, copy->bytes);
    ADD(fake_cuda_copies, 1);
    return OK;
}

int cuMemcpy2D_v2(const Copy *copy) { return cuMemcpy2DAsync_v2(copy, 0); }

/* FFmpeg and this library look these up by name, and call none of them here. */
#define UNUSED(name) int name(void) { return UNKNOWN; }
#define FOUR(a, b, c, d) UNUSED(a) UNUSED(b) UNUSED(c) UNUSED(d)
FOUR(cuArray3DCreate_v2, cuArrayCreate_v2, cuArrayDestroy, cuCtxCreate_v2)
FOUR(cuCtxDestroy_v2, cuCtxGetDevice, cuCtxSetLimit, cuDestroyExternalMemory)
FOUR(cuDestroyExternalSemaphore, cuDeviceComputeCapability, cuDeviceGetByPCIBusId, cuDeviceGetName)
FOUR(cuDeviceGetPCIBusId, cuDeviceGetUuid, cuDeviceGetUuid_v2, cuDevicePrimaryCtxGetState)
FOUR(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2, cuDevicePrimaryCtxReset, cuDevicePrimaryCtxSetFlags)
FOUR(cuEventCreate, cuEventDestroy_v2, cuEventQuery, cuEventRecord)
FOUR(cuEventSynchronize, cuExternalMemoryGetMappedBuffer, cuExternalMemoryGetMappedMipmappedArray, cuGLGetDevices_v2)
FOUR(cuGraphicsGLRegisterImage, cuGraphicsMapResources, cuGraphicsSubResourceGetMappedArray, cuGraphicsUnmapResources)
FOUR(cuGraphicsUnregisterResource, cuGraphicsResourceGetMappedPointer_v2, cuImportExternalMemory, cuImportExternalSemaphore)
FOUR(cuLaunchKernel, cuLinkAddData, cuLinkComplete, cuLinkCreate)
FOUR(cuLinkDestroy, cuStreamWaitEvent, cuMemAllocPitch_v2, cuMemcpy)
FOUR(cuMemcpyAsync, cuMemcpyDtoDAsync_v2, cuMemcpyDtoD_v2, cuMemcpyDtoHAsync_v2)
FOUR(cuMemcpyDtoH_v2, cuMemcpyHtoDAsync_v2, cuMemcpyHtoD_v2, cuMemsetD8Async)
FOUR(cuMipmappedArrayDestroy, cuMipmappedArrayGetLevel, cuModuleGetFunction, cuModuleGetGlobal)
FOUR(cuModuleLoadData, cuModuleUnload, cuSignalExternalSemaphoresAsync, cuStreamAddCallback)
UNUSED(cuStreamDestroy_v2) UNUSED(cuStreamQuery) UNUSED(cuStreamSynchronize)
FOUR(cuTexObjectCreate, cuTexObjectDestroy, cuWaitExternalSemaphoresAsync, cuEGLStreamProducerReturnFrame)
UNUSED(cuCtxSynchronize) UNUSED(cuMemGetInfo_v2) UNUSED(cuPointerGetAttribute) UNUSED(cuStreamGetCtx)
FOUR(cuEGLStreamConsumerDisconnect, cuEGLStreamProducerConnect, cuEGLStreamProducerDisconnect, cuEGLStreamProducerPresentFrame)
#ifndef OLD
UNUSED(cuMemAllocManaged) UNUSED(cuStreamCreate)
#endif
