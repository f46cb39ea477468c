"""The benchmark of the GPU path on stand-ins: the calls of each cell, the counts, and the written figures."""

from __future__ import annotations

import ctypes
import importlib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import real_cuda
from fake_cuda import Card, FakeTorch, fresh_process

import spdl_media as sm
from spdl_media.testing import index_planes, make_image, make_video

CHECKOUT = Path(__file__).resolve().parent.parent
BENCHMARKS = CHECKOUT / "samples" / "benchmarks"
NO_GPU = 3
OURS = ["CPU + transfer", "nvJPEG through DALI"]
VIDEO = [
    "video: CPU + transfer",
    "video: NVDEC through DALI",
    "video: NVDEC",
    "video: NVDEC, new decoders",
]
TRAINING = ["video: NVDEC, beside training"]
COPIES = ["transfer_buffer", "raw cudaMemcpyAsync"]
TINY = ("--rounds", "2", "--seconds", "0.01", "--batch", "2", "--size", "32", "--threads", "2")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with three smooth images of two sizes."""
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for index, (width, height) in enumerate([(64, 48), (48, 64), (64, 48)]):
        ramp = np.linspace(0, 200, height * width * 3).reshape(height, width, 3)
        jpeg = make_image(ramp.astype(np.uint8), codec="mjpeg")
        (pictures / f"{index}.jpg").write_bytes(jpeg)
    return pictures


@pytest.fixture
def video(tmp_path: Path) -> Path:
    path = tmp_path / "clip.mp4"
    path.write_bytes(make_video(index_planes(10, 64, 48), codec="libx264", format="mp4"))
    return path


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script as a module."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    before = set(sys.modules)
    yield importlib.import_module("gpu")
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCHMARKS)):
            del sys.modules[name]


@pytest.fixture
def batches(folder: Path) -> list[list[bytes]]:
    images = [path.read_bytes() for path in sorted(folder.iterdir())]
    return [images[:2], images[2:]]


@pytest.mark.skipif(real_cuda.why_not() is None, reason="there is a GPU")
def test_without_a_gpu_it_says_so(
    gpu: ModuleType,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--images", str(folder)])
    with pytest.raises(SystemExit) as end:
        gpu.main()
    printed = capsys.readouterr()
    assert (end.value.code, printed.out) == (NO_GPU, "")
    assert printed.err.startswith("no GPU can be used, so nothing is measured\npinned_memory: no:")


@pytest.mark.cuda("torch")
def test_with_a_gpu_every_cell_of_ours_is_measured(
    folder: Path, video: Path, tmp_path: Path
) -> None:
    result = tmp_path / "gpu.json"
    command = [sys.executable, BENCHMARKS / "gpu.py", "--images", folder, "--video", video, *TINY]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(CHECKOUT), *sys.path])}
    subprocess.run([*command, "--json", result], env=environment, check=True)
    document = json.loads(result.read_text())
    assert {"CPU + transfer", "video: CPU + transfer", *COPIES} <= set(document["results"])


# --- the whole program, on a stand-in device


class Cudart:
    """A stand-in for NVIDIA's runtime library on the same device."""

    def __init__(self, card: Card) -> None:
        self._card, self.copied = card, 0

    def cudaSetDevice(self, index: Any) -> int:  # noqa: N802  # the library's name
        return 0 if index.value < self._card.devices else 101

    def cudaMalloc(self, address: Any, nbytes: Any) -> int:  # noqa: N802
        address._obj.value = self._card.allocate(nbytes.value, 0, 1)
        return 0

    def cudaStreamCreateWithFlags(self, stream: Any, flags: Any) -> int:  # noqa: N802
        assert flags.value == 1, "it would wait for the default stream"
        stream._obj.value = self._card.new_stream(0).address
        return 0

    def cudaMemcpyAsync(  # noqa: N802
        self, target: Any, source: Any, nbytes: Any, kind: Any, stream: Any
    ) -> int:
        assert kind.value == 1, "not to the device"
        assert stream.value
        ctypes.memmove(target.value, source.value, nbytes.value)
        self.copied += nbytes.value
        return 0

    def cudaStreamSynchronize(self, stream: Any) -> int:  # noqa: N802
        assert stream.value
        return 0


class Machine:
    """A stand-in GPU, whose decoders are those of the CPU."""

    def __init__(self, gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, Any, Any]] = []
        self.card = Card(devices=1, nbytes=1 << 30)
        self.runtime = Cudart(self.card)
        self.torch: Any = FakeTorch(self.card)
        self.torch.cuda.get_device_name = lambda index: f"fake {index}"
        self._images, self._video = sm.load_image_batch, sm.load_video
        monkeypatch.setitem(sys.modules, "torch", self.torch)
        for name in ("cupy", "torch.utils", "torch.utils.data", "torchvision"):
            monkeypatch.setitem(sys.modules, name, None)
        for name in ("load_image_batch", "load_video"):
            monkeypatch.setattr(gpu.sm, name, getattr(self, name))
        found = SimpleNamespace(transfer=True, kernels=True)
        monkeypatch.setattr(gpu.sm, "cuda_capabilities", lambda _: found)
        real = gpu.Runtime
        monkeypatch.setattr(gpu, "Runtime", lambda: real(lambda _: self.runtime))

    def load_image_batch(self, srcs: Any, **options: Any) -> Any:
        assert (options["width"], options["height"], options["scale_mode"]) == (32, 32, None)
        return self._moved("images", self._images, srcs, options)

    def load_video(self, src: Any, **options: Any) -> Any:
        assert options["num_frames"] == 5
        return self._moved("video", self._video, src, options)

    def _moved(self, what: str, load: Any, src: Any, options: Any) -> Any:
        device = options.pop("cuda", None)
        self.calls.append((what, device, options.pop("decoder", None)))
        buffer = load(src, **options)
        return buffer if device is None else sm.transfer_buffer(buffer, cuda_config=device)


@pytest.fixture
def machine(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Machine:
    fresh_process(monkeypatch)
    return Machine(gpu, monkeypatch)


def run(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, *options: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", *map(str, options)])
    gpu.main()


def test_all_cells_in_one_run(
    gpu: ModuleType,
    machine: Machine,
    folder: Path,
    video: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = tmp_path / "gpu.json"
    options = ("--video", video, "--frames", 5, "--copy", 4096, "--json", result)
    run(gpu, monkeypatch, "--images", folder, *TINY, *options)
    document = json.loads(result.read_text())
    assert list(document["results"]) == [*OURS, *VIDEO, *COPIES]
    peers = {"torchvision, cuda", "torch DataLoader, pinned"}
    assert set(document["left_out"]) == {*peers, *TRAINING}
    assert document["machine"]["gpu"] == "fake 0"
    assert document["settings"]["images"] == 3
    for name, row in document["results"].items():
        assert row["per_second"]["lowest"] > 0
        assert row["difference"] == (None if name in COPIES else 0)
    assert set(document["results"]["transfer_buffer"]["ratios"]) == {"raw cudaMemcpyAsync"}
    assert set(document["results"][VIDEO[1]]["ratios"]) == {VIDEO[0]}
    assert {call for call in machine.calls if call[0] == "images"} == {
        ("images", None, None),
        ("images", 0, "dali"),
    }
    assert {call for call in machine.calls if call[0] == "video"} == {
        ("video", None, None),
        ("video", 0, "cpu"),
        ("video", 0, "dali"),
        ("video", 0, "nvdec"),
    }
    printed = capsys.readouterr()
    tables = [text.splitlines() for text in printed.out.strip().split("\n\n")]
    assert [table[0].split()[0] for table in tables] == ["images", "frames", "bytes"]
    assert [len(table) for table in tables] == [3, 5, 3]
    assert "torchvision, cuda is left out: " in printed.err


def test_what_fails_is_left_out_and_the_others_are_measured(
    gpu: ModuleType,
    machine: Machine,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def broken(job: Any) -> Any:
        raise RuntimeError("no such library\nand more")

    cells = {
        "CPU + transfer": gpu.cpu_and_transfer,
        "broken": broken,
        VIDEO[0]: broken,
        "2": broken,
    }
    monkeypatch.setattr(gpu, "CELLS", cells)
    monkeypatch.setattr(gpu, "rate_of", lambda cell, seconds: 1234.56)
    run(gpu, monkeypatch, "--images", folder, *TINY, "--markdown", "--cells", "r")
    printed = capsys.readouterr()
    assert printed.err.splitlines() == [
        "broken is left out: no such library",
        "video: CPU + transfer is left out: no --video is given",
        "round 1, CPU + transfer: 1235 images/s",
        "round 2, CPU + transfer: 1235 images/s",
    ]
    assert printed.out.startswith("| images | difference | images/s | Python |")


def test_misuse(
    gpu: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for options, message in (
        ([], "there is no .jpg or .jpeg file in"),
        (["--cells", "NVDEX"], "--cells: 'NVDEX' is in none of CPU + transfer; nvJPEG"),
    ):
        with pytest.raises(SystemExit) as caught:
            run(gpu, monkeypatch, "--images", tmp_path, *options)
        assert caught.value.code == 2
        assert message in capsys.readouterr().err
        (tmp_path / "one.jpg").touch()


# --- parts of it


def cell_of(gpu: ModuleType, **options: Any) -> Any:
    given: dict[str, Any] = {
        "kind": "images",
        "load": lambda number: number,
        "count": lambda number: 3,
        "wait": lambda result: None,
        "to_host": lambda result: np.zeros(2, np.uint8),
    }
    return gpu.Cell(**{**given, **options})


def test_time_ends_when_the_device_is_done(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 0.0, 1.0, 2.0, 9.0])  # begin, three looks, and after the wait
    monkeypatch.setattr(gpu.time, "perf_counter", lambda: next(clock))
    waited: list[int] = []
    cell = cell_of(gpu, wait=waited.append)
    assert gpu.rate_of(cell, 1.5) == 2 * 3 / 9.0
    assert waited == [0, 1], "the last result, and the one before the clock starts"


def test_threads_take_turns_and_are_summed(gpu: ModuleType) -> None:
    seen: set[int] = set()

    def load(number: int) -> int:
        seen.add(number)
        return number

    assert gpu.rate_of(cell_of(gpu, load=load, threads=2), 0.01) > 0
    assert {0, 1, 2, 3} <= seen


def test_an_error_in_a_thread_is_raised(gpu: ModuleType) -> None:
    def load(number: int) -> None:
        if number == 1:
            raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        gpu.rate_of(cell_of(gpu, load=load, threads=2), 0.01)


def test_a_counting_thread_is_set_beside_each_cell(gpu: ModuleType) -> None:
    def hold(number: int) -> None:
        end = time.perf_counter() + 0.02
        while time.perf_counter() < end:  # in pure Python, so the GIL is shared
            pass

    def rest(number: int) -> None:
        time.sleep(0.02)

    cells = {"hold": cell_of(gpu, load=hold), "rest": cell_of(gpu, load=rest)}
    assert gpu.measure(cells, 3, 0.1, counting=True) == {}
    # Other processes may slow the counting thread down as well, but not in each round.
    held, rested = cells["hold"].counted, cells["rest"].counted
    assert min(held) < max(rested)
    assert gpu.summary(cells)["rest"]["counted"]["lowest"] == min(rested)


def test_steps_of_a_training_are_queued_before_each_video(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[str] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            used.append(self.name)

        def __exit__(self, *_: object) -> None:
            pass

    cuda = SimpleNamespace(
        default_stream=lambda device: Stream("default"),
        stream=lambda stream: stream,
    )
    torch = SimpleNamespace(
        cuda=cuda,
        device=str,
        ones=lambda shape, device: None,
        mm=lambda a, b: used.append("product"),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]  # a stand-in
    monkeypatch.setattr(
        gpu, "video_on", lambda *_: cell_of(gpu, load=lambda n: used.append("load"))
    )
    gpu.beside_training(gpu.Job([], [], 8, 1, 1, 1)).load(0)
    assert used == ["default", *["product"] * gpu.STEP, "load"]


def test_rounds_go_forwards_and_backwards(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    cells = {name: cell_of(gpu, load=name) for name in "abc"}
    monkeypatch.setattr(gpu, "rate_of", lambda cell, _: order.append(cell.load) or 1.0)
    assert gpu.measure(cells, 2, 0) == {}
    assert order == list("abccba")
    assert [cell.rates for cell in cells.values()] == [[1.0, 1.0]] * 3


def test_a_cell_that_fails_in_a_round_costs_the_others_nothing(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def rate(cell: Any, _: float) -> float:
        seen.append(cell.load)
        if cell.load == "b" and seen.count("b") == 2:
            raise RuntimeError("device is lost\nand more")
        return 1.0

    cells = {name: cell_of(gpu, load=name) for name in "abc"}
    monkeypatch.setattr(gpu, "rate_of", rate)
    assert gpu.measure(cells, 3, 0) == {"b": "in round 2: device is lost"}
    assert seen == list("abccbaac")
    assert {name: cell.rates for name, cell in cells.items()} == {"a": [1.0] * 3, "c": [1.0] * 3}


class WorksAhead:
    """A DataLoader whose workers are always some batches ahead of the consumer."""

    def __init__(self, sampler: Any, ahead: int) -> None:
        self.sampler, self.ahead = sampler, ahead
        self.made = 0

    def __iter__(self) -> Iterator[list[int]]:
        made: list[list[int]] = []
        indices = iter(self.sampler)
        while True:
            while len(made) < self.ahead and (batch := next(indices, None)) is not None:
                made.append(batch)
                self.made += 1
            if not made:
                return
            yield made.pop(0)


def test_what_a_loader_has_made_ahead_is_not_counted(gpu: ModuleType) -> None:
    """Its workers also stop before the next cell is measured."""
    sampler = gpu.Endless([[b""] * 3, [b""]])
    loader = WorksAhead(sampler, 4)
    rounds = gpu.Rounds(loader, sampler, loader.ahead)
    assert (rounds.next(), rounds.size) == ([0, 1, 2], 3)  # when the cell is tried
    for _ in range(2):
        rounds.begin()
        before = loader.made
        taken = [rounds.next() for _ in range(6)]
        assert loader.made - before == 6, "as many are made inside of the clock as are counted"
        assert taken == [[0, 1, 2], [3]] * 3
        rounds.end()
        assert loader.made - before == 6
    assert sampler.is_stopped


def test_a_round_of_a_cell_begins_before_the_clock_and_ends_behind_it(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []

    def now() -> float:
        log.append("clock")
        return float(len(log))

    monkeypatch.setattr(gpu.time, "perf_counter", now)
    cell = cell_of(
        gpu,
        begin=lambda: log.append("begin"),
        end=lambda: log.append("end"),
        load=lambda _: log.append("load"),
    )
    gpu.rate_of(cell, 5)
    assert log[:3] == ["begin", "load", "clock"]
    assert log[-2:] == ["clock", "end"]
    broken = cell_of(gpu, load=lambda _: 1 / 0, end=lambda: log.append("ended all the same"))
    with pytest.raises(ZeroDivisionError):
        gpu.rate_of(broken, 1)
    assert log[-1] == "ended all the same"


def test_another_shape_is_refused_and_the_difference_is_reported(gpu: ModuleType) -> None:
    assert gpu.tried(cell_of(gpu, wanted=lambda: np.array([3, 4], np.uint8))) == 3.5
    with pytest.raises(ValueError, match=r"it gives \(2,\), and \(3,\) is wanted"):
        gpu.tried(cell_of(gpu, wanted=lambda: np.zeros(3, np.uint8)))


def test_ratios_are_of_the_same_round(gpu: ModuleType) -> None:
    raw, ours = (cell_of(gpu, kind="bytes", rates=rates) for rates in ([10.0, 20.0], [9.0, 19.0]))
    results = gpu.summary({"raw cudaMemcpyAsync": raw, "transfer_buffer": ours})
    ratio = results["transfer_buffer"]["ratios"]["raw cudaMemcpyAsync"]
    assert (ratio["lowest"], ratio["highest"]) == (0.9, 0.95)
    assert results["raw cudaMemcpyAsync"]["ratios"] == {}


def test_the_runtime_is_named_when_it_is_missing_or_fails(gpu: ModuleType) -> None:
    def missing(_: str) -> Any:
        raise OSError("cannot open")

    with pytest.raises(OSError, match=r"the CUDA runtime is not there: none of libcudart\.so\.13"):
        gpu.Runtime(missing)
    runtime = gpu.Runtime(lambda _: Cudart(Card(devices=1)))
    with pytest.raises(RuntimeError, match="cudaSetDevice failed: cudaError 101"):
        runtime.select(1)


def job_on_cpu(gpu: ModuleType, batches: list[list[bytes]]) -> Any:
    return gpu.Job(batches, (), 32, 5, 0, 64, "cpu")


def test_the_loader_of_torch_gives_the_same_images(
    gpu: ModuleType, batches: list[list[bytes]]
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("PIL")
    cell = gpu.torch_loader(job_on_cpu(gpu, batches))
    assert gpu.tried(cell) < 2
    sizes = [(cell.load(number).shape[0], cell.count(number)) for number in (1, 2, 3)]
    assert sizes == [(1, 1), (2, 2), (1, 1)], "batch by batch, again and again"
    cell.begin()
    assert cell.load(0).shape[0] == 2, "each round begins with the first"
    cell.end()


def test_torchvisions_cell_gives_the_same_images(
    gpu: ModuleType, batches: list[list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    image = pytest.importorskip("PIL.Image")

    def decode_jpeg(coded: Any, *, mode: str, device: Any) -> Any:
        assert (mode, str(device)) == ("RGB", "cpu")
        pictures = [np.array(image.open(io.BytesIO(one.numpy().tobytes()))) for one in coded]
        return [torch.from_numpy(one).permute(2, 0, 1) for one in pictures]

    def resize(picture: Any, size: Any, *, interpolation: int, antialias: bool) -> Any:
        assert (interpolation, antialias) == (3, True), "not a smoothed bicubic kernel"
        return torch.nn.functional.interpolate(
            picture[None], size, mode="bicubic", antialias=antialias
        )[0]

    modes = SimpleNamespace(RGB="RGB")
    stand_ins: dict[str, Any] = {
        "torchvision": SimpleNamespace(),
        "torchvision.io": SimpleNamespace(decode_jpeg=decode_jpeg, ImageReadMode=modes),
        "torchvision.transforms": SimpleNamespace(),
        "torchvision.transforms.v2": SimpleNamespace(),
        "torchvision.transforms.v2.functional": SimpleNamespace(resize=resize),
    }
    for name, module in stand_ins.items():
        monkeypatch.setitem(sys.modules, name, module)
    cell = gpu.torchvision(job_on_cpu(gpu, batches))
    assert gpu.tried(cell) < 2
    assert cell.load(1).shape == (1, 32, 32, 3)
