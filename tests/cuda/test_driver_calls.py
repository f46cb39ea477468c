"""Calls of NVIDIA's driver by ctypes, on a stand-in library, and the end of processes that use it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import color_kernel
import pytest

TESTS = Path(__file__).resolve().parent.parent

# Device memory is host memory. An event is complete a fixed number of seconds after it was recorded.
DRIVER = r"""
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef struct { double reached; } Event;
static void *kernels;
static __thread int depth;
int live_events = 0;

static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec +
t.tv_nsec * 1e-9; } static int current(void) { return depth > 0 ? 0 : 201; } static double seconds(void) {
const char *text = getenv("FAKE_SECONDS"); return text ? atof(text) : 0; }

int cuInit(unsigned flags) { return flags; } int cuDriverGetVersion(int *version) { *version = 12040;
return 0; } int cuDeviceGetCount(int *count) { *count = 1; return 0; } int cuDeviceGet(int *device, int
ordinal) { *device = ordinal; return ordinal ? 101 : 0; } int cuDevicePrimaryCtxRetain(void **context, int
device) { *context = (void *)(0x123456789abcULL + device); return 0; } int cuCtxPushCurrent_v2(void
*context) { depth++; return context == (void *)0x123456789abcULL ? 0 : 201; } int cuCtxPopCurrent_v2(void
**context) { *context = 0; depth--; return 0; } int cuCtxGetDevice(int *device) { *device = 0; return
current(); } int cuCtxSynchronize(void) { return current(); } int cuStreamGetCtx(void *stream, void
**context) { *context = (void *)0x123456789abcULL; return 0; } int cuStreamCreate(void **stream, unsigned
flags) { *stream = malloc(1); return flags == 1 ? current() : 1; } int cuStreamWaitEvent(void *stream,
Event *event, unsigned flags) { return event && !flags ? current() : 400; } int cuEventCreate(Event
**event, unsigned flags) {
    *event = calloc(1, sizeof **event);
    live_events++;
    return flags == 3 ? current() : 1;
}
int cuEventRecord(Event *event, void *stream) { event->reached = now() + seconds(); return current(); }
int cuEventQuery(Event *event) { return now() < event->reached ? 600 : current(); }
int cuEventSynchronize(Event *event)
{
    while (now() < event->reached) usleep(1000);
    return current();
} int cuEventDestroy_v2(Event *event) { free(event); live_events--; return current(); } int
cuGetErrorName(int status, const char **text) { *text = "CUDA_ERROR_OF_THE_STAND_IN"; return 0; } int
cuGetErrorString(int status, const char **text) { *text = "what it means"; return 0; } int
cuPointerGetAttribute(int *kind, int attribute, void *pointer) { *kind = 1; return attribute == 2 ?
current() : 1; } int cuMemGetInfo_v2(size_t *available, size_t *total) { *available = 5000000000; *total =
6000000000; return current(); }

static int copy(void *target, const void *source, size_t size) { memcpy(target, source, size); return
current(); } int cuMemcpyHtoDAsync_v2(void *target, const void *source, size_t size, void *stream) {
return copy(target, source, size); } int cuMemcpyDtoHAsync_v2(void *target, const void *source, size_t
size, void *stream) { return copy(target, source, size); } int cuMemcpyDtoDAsync_v2(void *target, const
void *source, size_t size, void *stream) { return copy(target, source, size); }

int cuModuleLoadData(void **module, const char *ptx)
{
    if (!strstr(ptx, ".visible .entry yuv8_to_uint8")) return 218;
    kernels = kernels ? kernels : dlopen(getenv("FAKE_KERNELS"), RTLD_NOW);
    *module = kernels;
    return kernels ? current() : 301;
}
int cuModuleGetFunction(void **function, void *module, const char *name)
{
    char symbol[99];
    snprintf(symbol, sizeof symbol, "run_%s", name);
    *function = dlsym(module, symbol);
    return *function ? current() : 500;
} int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
unsigned bz,
                   unsigned shared, void *stream, void **arguments, void **extra)
{
    unsigned dims[] = {gx, gy, gz, bx, by, bz};
    if (shared || extra) return 1;
    ((void (*)(unsigned *, void *))function)(dims, arguments[0]);
    return current();
}
"""

BEGIN = """
import ctypes, gc, sys, threading
sys.path.insert(0, sys.argv[1])
import numpy as np
from fake_cuda import Card, FakeTorch
sys.modules["torch"] = torch = FakeTorch(Card(devices=1, nbytes=1 << 28))
sys.modules["cupy"] = None
import color_reference
import spdl_media as sm
from spdl_media import cuda_driver, handover
from spdl_media.cuda import color
def send(size=1000):
    return sm.transfer_buffer(sm.CPUBuffer(np.arange(size)), cuda_config=0)
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return environment variables with which a process loads the stand-in driver."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("there is no C compiler, or the driver has another name here")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "cuda.c").write_text(DRIVER, encoding="utf-8")
    library = folder / "libcuda.so.1"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", library, folder / "cuda.c", "-ldl"], check=True
    )
    kernels = color_kernel.shared_folder(tmp_path_factory)
    color_kernel.compiled(kernels)
    path = os.pathsep.join([str(folder), os.environ.get("LD_LIBRARY_PATH", "")])
    return os.environ | {
        "LD_LIBRARY_PATH": path,
        "FAKE_KERNELS": str(kernels / "yuv_to_rgb.so"),
        "PYTHONPATH": os.pathsep.join(part for part in sys.path if part),
    }


def start(environment: dict[str, str], program: str, seconds: float = 0) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", BEGIN + program, str(TESTS)],
        env={**environment, "FAKE_SECONDS": str(seconds)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    stdout, stderr = process.communicate(timeout=500)
    return process.returncode, stdout.strip(), stderr


def test_copies_and_the_kernel_go_through_the_drivers_own_functions(
    environment: dict[str, str],
) -> None:
    program = """
for size in (1000, 100_000):
    buffer = send(size)
    assert (sm.transfer_buffer_cpu(buffer).array == np.arange(size)).all()
rng = np.random.default_rng(0)
planes = [rng.integers(0, 256, shape, np.uint8) for shape in ((30, 40), (15, 20, 2))]
there = [sm.transfer_buffer(sm.CPUBuffer(plane), cuda_config=0) for plane in planes]
def converted(options):
    return sm.transfer_buffer_cpu(color_reference.to_rgb(there, "nv12", **options)).array
cases = {}, {"width": 17, "height": 23, "layout": "NCHW"}, {"normalize": ((0,) * 3, (1,) * 3)}
found = list(map(converted, cases))
color.convert_on_device = lambda device, *rest: color_reference.convert_on_host(*rest)
for one, options in zip(found, cases):
    np.testing.assert_array_equal(one, converted(options))
assert cuda_driver.device_of_stream(0x7fff_0000_1234) == 0
assert handover.KEEPER.drain(50)
del there, buffer
gc.collect()
events = ctypes.c_int.in_dll(ctypes.CDLL("libcuda.so.1"), "live_events")
assert not events.value, events
print("all is right")
"""
    assert ended(start(environment, program)) == (0, "all is right", "")


def test_what_the_driver_refuses_is_said_in_its_words(environment: dict[str, str]) -> None:
    program = """
try:
    cuda_driver.call("cuModuleLoadData", ctypes.byref(ctypes.c_void_p()), b"no kernel of ours")
except sm.TransferError as error:
    print(error)
"""
    said = "NVIDIA's driver refuses cuModuleLoadData: CUDA_ERROR_OF_THE_STAND_IN (what it means)"
    assert ended(start(environment, program)) == (0, said, "")


ENDS = {
    "the end of the program": ("kept = send()", 0),
    "without a reference": ("send()", 0),
    "another thread's copy": (
        "thread = threading.Thread(target=send); thread.start(); thread.join()",
        0,
    ),
    "sys.exit": ("kept = send(); sys.exit(3)", 3),
    "an error": ("kept = send(); raise SystemExit(4)", 4),
}


@pytest.mark.long
def test_processes_end_as_they_should_with_copies_under_way(environment: dict[str, str]) -> None:
    """A daemon thread within PyTorch's C++ code would abort them with status 134."""
    for seconds in (0.05, 0.5):
        runs = [
            (start(environment, program, seconds), code)
            for program, code in ENDS.values()
            for _ in range(2)
        ]
        assert [ended(run)[0] for run, _ in runs] == [code for _, code in runs]


@pytest.mark.parametrize("name", list(ENDS)[2:3])
def test_the_end_waits_for_a_copy_under_way(environment: dict[str, str], name: str) -> None:
    program, code = ENDS[name]
    told = "\nimport atexit; atexit._run_exitfuncs(); print(handover.KEEPER.num_kept)"
    assert ended(start(environment, program + told, 0.5)) == (code, "0", "")


def test_a_device_that_hangs_does_not_keep_the_process(environment: dict[str, str]) -> None:
    program = "handover._EXIT_LIMIT = 0.2\nkept = send()\nprint(handover.KEEPER.num_kept)"
    assert ended(start(environment, program, 1e9)) == (0, "1", "")
