"""cuda_capabilities, with each part present or missing."""

from __future__ import annotations

import ctypes
import re
import sys
from typing import Any

import pytest
from fake_cuda import HISTORY, Card, FakeCupy, FakeTorch, fresh_process

import spdl_media as sm
from spdl_media.cuda import capabilities
from spdl_media.cuda_driver import driver_is_up

PARTS = ("driver", "torch", "cupy", "nvcuvid", "dali", "nvimgcodec")
NEEDS = {
    "pinned_memory": {"driver"},
    "transfer": {"driver"},
    "kernels": {"driver"},
    "dali": {"driver", "dali"},
    "nvjpeg": {"driver", "dali", "nvimgcodec"},
    "nvdec": {"driver", "nvcuvid"},
}
SAYS = {
    "driver": r"NVIDIA's driver is missing \(libcuda\.so\.1: .*docker run --gpus all",
    "torch": r"torch is not installed: pip install \"\.\[torch\]\"",
    "cupy": r"cupy is not installed: pip install cupy-cuda12x",
    "nvcuvid": r"\(libnvcuvid\.so\.1: .*NVIDIA_DRIVER_CAPABILITIES=compute,utility,video",
    "dali": r"dali is not installed: pip install nvidia-dali-cuda120",
    "nvimgcodec": r"nvimgcodec is not installed: pip install nvidia-nvimgcodec-cu12",
}


class Driver:
    """A stand-in for libcuda with a number of devices."""

    def __init__(self, card: Card) -> None:
        self._card = card

    def cuInit(self, _: int) -> int:  # noqa: N802  # the driver's name
        return 0 if self._card.devices else 100

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802  # the driver's name
        count._obj.value = self._card.devices
        return 0


class Machine:
    """A stand-in for a machine that has all parts, until a test removes some."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.card = Card(devices=2)
        self.missing: set[str] = set()
        self.torch, self.cupy = FakeTorch(self.card), FakeCupy(self.card)
        self._patch = monkeypatch
        monkeypatch.setattr(capabilities.ctypes, "CDLL", self.load)
        monkeypatch.setattr(capabilities, "check_device", self.check_device)
        monkeypatch.setattr(capabilities, "is_available", lambda name: name not in self.missing)
        monkeypatch.setattr(capabilities, "require", self.require)
        for name in ("torch", "cupy"):
            monkeypatch.setitem(sys.modules, name, getattr(self, name))

    def take_away(self, part: str) -> None:
        self.missing.add(part)
        if part in ("torch", "cupy"):
            self._patch.setitem(sys.modules, part, None)
        if part == "driver":
            self.card.devices = 0

    def load(self, name: str) -> Any:
        part = {"libcuda.so.1": "driver", "libnvcuvid.so.1": "nvcuvid"}[name]
        if part in self.missing:
            raise OSError(f"{name}: cannot open shared object file")
        return Driver(self.card)

    def require(self, name: str, purpose: str) -> Any:
        return getattr(self, name, None)

    def check_device(self, index: int | None) -> None:
        if index is not None and index >= self.card.devices:
            raise ValueError(f"CUDA device {index} was asked for, and there are 2")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    fresh_process(monkeypatch)
    return Machine(monkeypatch)


def test_all_is_there(machine: Machine) -> None:
    found = sm.cuda_capabilities()
    assert tuple(found.parts) == PARTS
    for one in (*(getattr(found, name) for name in NEEDS), *found.parts.values()):
        assert (bool(one), one.reason, one.missing) == (True, "", ())
    assert HISTORY.used, "a child that is forked now has no driver"


@pytest.mark.parametrize("part", PARTS)
def test_a_missing_part_is_named_and_takes_nothing_else_with_it(
    machine: Machine, part: str
) -> None:
    machine.take_away(part)
    found = sm.cuda_capabilities()
    assert {name for name, one in found.parts.items() if not one} == {part}
    assert not found.parts[part].available
    assert re.search(SAYS[part], found.parts[part].reason)
    for name, needs in NEEDS.items():
        one = getattr(found, name)
        assert bool(one) == (part not in needs), name
        if part in needs:
            assert one.missing == (part,)
            assert re.search(SAYS[part], one.reason)


def test_memory_and_copies_need_one_of_two_libraries(machine: Machine) -> None:
    for part in ("torch", "cupy"):
        machine.take_away(part)
    found = sm.cuda_capabilities()
    for one in (found.pinned_memory, found.transfer, found.kernels, found.nvdec):
        assert one.missing == ("torch or cupy",)
        assert "torch is not installed" in one.reason
        assert "cupy is not installed" in one.reason
    assert found.dali
    assert found.nvjpeg


def test_everything_that_is_missing_is_said_at_once(machine: Machine) -> None:
    for part in PARTS:
        machine.take_away(part)
    found = sm.cuda_capabilities()
    assert found.nvdec.missing == ("driver", "nvcuvid", "torch or cupy")
    for part in ("driver", "nvcuvid", "torch", "cupy"):
        assert re.search(SAYS[part], found.nvdec.reason)
    lines = str(found).splitlines()
    assert lines[0] == "pinned_memory: no: driver, torch or cupy missing"
    assert lines[4] == "nvjpeg: no: driver, dali, nvimgcodec missing"
    assert lines[6] == "parts:"
    assert len(lines) == 7 + len(PARTS)
    assert sum("cupy is not installed" in line for line in lines) == 1


def test_print_says_what_is_there(machine: Machine) -> None:
    machine.take_away("cupy")
    lines = str(sm.cuda_capabilities()).splitlines()
    assert lines[:3] == ["pinned_memory: yes", "transfer: yes", "kernels: yes"]
    assert lines[5] == "nvdec: yes"
    assert "  driver: yes" in lines


def test_a_driver_without_a_device(machine: Machine) -> None:
    machine.card.devices = 0
    reason = sm.cuda_capabilities().parts["driver"].reason
    assert reason.startswith("NVIDIA's driver is there and finds no device (error 100)")
    assert "CUDA_VISIBLE_DEVICES" in reason
    assert not HISTORY.used


def test_a_torch_without_cuda(machine: Machine) -> None:
    machine.torch.backends.cuda.is_built = lambda: False
    machine.torch.cuda.is_available = lambda: False
    found = sm.cuda_capabilities()
    assert "torch 0.fake is built without CUDA" in found.parts["torch"].reason
    assert "pip install --force-reinstall torch" in found.parts["torch"].reason
    assert found.transfer, "CuPy copies, too"


def test_a_number_that_no_device_has_is_a_reason(machine: Machine) -> None:
    found = sm.cuda_capabilities(2)
    assert all(found.parts.values())
    for name in NEEDS:
        one = getattr(found, name)
        assert "was asked for, and there are 2" in one.reason, name
        assert one.missing == ()
    assert sm.cuda_capabilities(1).transfer


def test_a_forked_child_hears_so(machine: Machine) -> None:
    sm.cuda_capabilities()
    HISTORY.after_fork()
    found = sm.cuda_capabilities()
    assert "it was forked from one that had used CUDA" in found.parts["driver"].reason
    assert found.parts["cupy"]
    assert not found.transfer


def test_misuse() -> None:
    with pytest.raises(ValueError, match="device_index must be at least 0, not -1"):
        sm.cuda_capabilities(-1)
    with pytest.raises(TypeError, match="cuda_config must be the number of a device"):
        sm.cuda_capabilities("0")  # type: ignore[arg-type]  # what is refused


def test_here_every_part_has_an_answer() -> None:
    """Without stand-ins, on any machine."""
    found = sm.cuda_capabilities()
    assert tuple(found.parts) == PARTS
    for one in (*(getattr(found, name) for name in NEEDS), *found.parts.values()):
        assert bool(one) == (one.reason == "")


@pytest.mark.cuda("torch")
def test_on_a_real_gpu_copies_are_possible() -> None:
    found = sm.cuda_capabilities()
    assert found.parts["driver"]
    assert found.pinned_memory
    assert found.transfer


# --- a driver that other libraries have initialised


@pytest.mark.parametrize(("status", "is_up"), [(0, True), (3, False), (100, True)])
def test_a_driver_that_others_have_started_is_noticed(status: int, is_up: bool) -> None:
    class Loaded:
        def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802  # the driver's name
            assert isinstance(count._obj, ctypes.c_int)
            return status

    assert driver_is_up(lambda name, mode: Loaded()) == is_up


def test_a_driver_that_nobody_has_loaded_is_not_loaded_to_ask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(name: str, mode: int) -> Any:
        raise OSError("libcuda.so.1: not loaded")

    assert not driver_is_up(load)
    with open("/proc/self/maps") as maps:
        if "libcuda.so" not in maps.read():
            assert not driver_is_up()


def test_the_history_hears_of_it_before_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    history = type(HISTORY)()
    history.before_fork()
    before = history.used
    monkeypatch.setattr("spdl_media.cuda_driver.driver_is_up", lambda: True)
    history.before_fork()
    history.after_fork()
    assert (before, history.used, history.lost) == (driver_is_up(), False, True)
    history.after_fork()
    assert history.lost, "a grandchild has no driver either"
