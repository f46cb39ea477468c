/* A CUDA driver without a device, as far as decoding needs one.
 *
 * Tests read or set the variables below by ctypes. Compiled with -DOLD, it lacks a function that this library
 * calls, as the driver of an old CUDA does. */
#include <stddef.h>

enum { OK = 0, OUT_OF_MEMORY = 2, INVALID_CONTEXT = 201, UNKNOWN = 999 };

/* Settings. */
long long fake_cuda_gone = 0; /* what each call returns, once the device is gone */
long long fake_cuda_version = 13000;
long long fake_cuda_devices = 1;

static char primary; /* its address is the primary context */

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

int cuCtxPushCurrent_v2(void *context) { return context == &primary ? (int)fake_cuda_gone : INVALID_CONTEXT; }
int cuCtxPopCurrent_v2(void **context) { if (context) *context = &primary; return (int)fake_cuda_gone; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &primary; return (int)fake_cuda_gone; }

/* All work is done at once, so events are only counted. */
long long fake_cuda_events = 0;
int cuEventCreate(void **event, unsigned flags) { *event = &primary; fake_cuda_events++; return (int)fake_cuda_gone; }
int cuEventRecord(void *event, void *stream) { return (int)fake_cuda_gone; }
int cuStreamWaitEvent(void *stream, void *event, unsigned flags) { return (int)fake_cuda_gone; }
int cuEventDestroy_v2(void *event) { fake_cuda_events--; return (int)fake_cuda_gone; }

/* What this library looks up by name, and does not need here. */
#define UNUSED(name) int name(void) { return UNKNOWN; }
#ifndef OLD
UNUSED(cuStreamCreate)
#endif
