"""``load_image_batch``: rows in the order of the inputs, and handling of inputs that fail."""

from __future__ import annotations

import array
import gc
import io
import pickle
import re
import signal
import threading
import weakref
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from effort import each
from still_metadata import exif_block, png_with_exif

import spdl_media as sm

# Patched in: no input is known that leads to an FFmpeg error that is not a MediaError.
from spdl_media.batch import _placed
from spdl_media.testing import frame_index, index_frames, index_samples, make_audio, make_image

WIDTH, HEIGHT, COUNT = 40, 30, 32
PICTURES = index_frames(COUNT, WIDTH, HEIGHT)
SOURCES = [make_image(picture) for picture in PICTURES]
BAD = b"no picture at all"


def with_bad(*positions: int) -> list[bytes]:
    return [BAD if position in positions else source for position, source in enumerate(SOURCES)]


def test_rows_are_the_inputs_in_order() -> None:
    batch = sm.load_image_batch(SOURCES)
    assert (batch.shape, batch.dtype) == ((COUNT, HEIGHT, WIDTH, 3), np.uint8)
    np.testing.assert_array_equal(np.asarray(batch), PICTURES)
    assert batch.failures == ()
    assert batch.indices == tuple(range(COUNT))
    assert batch.valid.all()


def test_inputs_may_come_from_a_generator_and_be_paths(tmp_path) -> None:
    for index, source in enumerate(SOURCES[:3]):
        (tmp_path / f"{index}.png").write_bytes(source)
    batch = sm.load_image_batch(path for path in sorted(tmp_path.iterdir()))
    np.testing.assert_array_equal(np.asarray(batch), PICTURES[:3])


def test_each_row_is_what_load_image_gives() -> None:
    options: dict[str, Any] = {"width": 24, "height": 24, "scale_mode": "crop", "quality": "fast"}
    batch = np.asarray(sm.load_image_batch(SOURCES[:4], **options))
    for row, source in zip(batch, SOURCES, strict=False):
        np.testing.assert_array_equal(row, np.asarray(sm.load_image(source, **options)))


def test_planes_take_half_the_bytes() -> None:
    planes = sm.load_image_batch(SOURCES[:2], width=32, height=24, pix_fmt="yuv420p")
    assert planes.shape == (2, 1, 36, 32)
    assert planes.nbytes * 2 == sm.load_image_batch(SOURCES[:2], width=32, height=24).nbytes


@pytest.mark.parametrize("position", [0, 1, 15, 16, COUNT - 2, COUNT - 1])
def test_one_bad_input_in_each_position(position: int) -> None:
    srcs = with_bad(position)
    with pytest.raises(sm.DemuxError, match=rf"input {position} of the batch of 32: ") as caught:
        sm.load_image_batch(srcs)
    assert type(caught.value) is type(caught.value.__cause__)
    assert caught.value.source == "bytes of length 17"
    rest = [index for index in range(COUNT) if index != position]

    skipped = sm.load_image_batch(srcs, on_error="skip")
    assert skipped.indices == tuple(rest)
    assert skipped.valid.tolist() == [True] * 31
    np.testing.assert_array_equal(np.asarray(skipped), PICTURES[rest])

    filled = sm.load_image_batch(srcs, on_error="fill")
    assert filled.indices == tuple(range(COUNT))
    assert np.flatnonzero(~filled.valid).tolist() == [position]
    assert not np.asarray(filled)[position].any()
    np.testing.assert_array_equal(np.asarray(filled)[rest], PICTURES[rest])
    for buffer in (skipped, filled):
        ((index, source, error),) = [(f.index, f.source, f.error) for f in buffer.failures]
        assert (index, source) == (position, "bytes of length 17")
        assert isinstance(error, sm.DemuxError)
        assert error.__traceback__ is None


def test_what_is_wrong_with_an_input(tmp_path) -> None:
    jpeg = make_image(PICTURES[0], codec="mjpeg")
    srcs = [SOURCES[0], tmp_path / "missing.png", b"", jpeg[: len(jpeg) // 2], tmp_path]
    batch = sm.load_image_batch(srcs, width=20, height=20, on_error="fill")
    kinds = [type(failure.error) for failure in batch.failures]
    assert kinds == [sm.SourceError, sm.DemuxError, sm.DecodeError, sm.SourceError]
    assert batch.failures[0].source == str(tmp_path / "missing.png")


def test_an_error_that_names_its_position_survives_pickling() -> None:
    with pytest.raises(sm.DemuxError) as caught:
        sm.load_image_batch(with_bad(3))
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.source) == (str(caught.value), caught.value.source)


def test_all_bad() -> None:
    srcs = [BAD] * 7
    with pytest.raises(sm.DemuxError, match="input 0 of the batch of 7"):
        sm.load_image_batch(srcs)
    for policy in ("skip", "fill"):
        with pytest.raises(
            sm.ConvertError, match=r"none of the 7 inputs could be loaded.*input 4: .*and 2 more"
        ) as caught:
            sm.load_image_batch(srcs, on_error=policy)
        assert isinstance(caught.value.__cause__, sm.DemuxError)
    with pytest.raises(sm.ConvertError, match="none of the 7"):
        sm.load_image_batch(srcs, width=8, height=8, on_error="skip")


@each(
    "options",
    [
        {},
        {"layout": "NCHW"},
        {"pix_fmt": "yuv420p"},
        {"pix_fmt": "gbrp"},
        {"pix_fmt": "gbrp", "layout": "NHWC"},
        {"pix_fmt": "gray10le"},
        {"pix_fmt": "rgba64le", "layout": "NCHW"},
    ],
)
def test_all_bad_with_known_sizes_are_zeros(options: dict[str, Any]) -> None:
    options = {"width": 20, "height": 12, "on_error": "fill", **options}
    filled = sm.load_image_batch([BAD] * 3, **options)
    good = sm.load_image_batch(SOURCES[:3], **options)
    assert (filled.shape, filled.dtype) == (good.shape, good.dtype)
    assert not np.asarray(filled).any()
    assert not filled.valid.any()
    assert [failure.index for failure in filled.failures] == [0, 1, 2]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"width": 21, "pix_fmt": "yuv420p"},
            (
                "the planes of 21x12 yuv420p do not make one rectangle: the width is odd. Scale or crop to "
                "an even width, or take pix_fmt='rgb24'"
            ),
        ),
        (
            {"pix_fmt": "yuv420p", "layout": "NCHW"},
            (
                "layout='NCHW' is for RGB and gray; yuv420p has chroma planes of another size. Leave layout "
                "out, or take pix_fmt='rgb24'"
            ),
        ),
        (
            {"pix_fmt": "pal8"},
            (
                "pixel format 'pal8' makes no array. Take another, such as pix_fmt='rgb24' (of "
                "load_image and get_video_filter_desc)"
            ),
        ),
    ],
)
def test_all_bad_where_no_zeros_can_stand_for_them(options: dict[str, Any], reason: str) -> None:
    options = {"width": 20, "height": 12, "on_error": "fill", **options}
    with pytest.raises(sm.ConvertError) as caught:
        sm.load_image_batch([BAD] * 2, **options)
    assert str(caught.value).startswith(
        "none of the 2 inputs could be loaded. on_error='fill' has no zeros for them: "
        f"{reason}. input 0: bytes of length {len(BAD)}: "
    )
    assert isinstance(caught.value.__cause__, sm.DemuxError)
    with pytest.raises(sm.ConvertError) as caught:
        sm.load_image_batch(SOURCES, **options)
    assert str(caught.value) == (
        f"bytes of length {len(SOURCES[0])}: {reason}, or one array a plane: "
        "convert_frames(layout='planes')"
    )


@pytest.mark.parametrize("on_error", ["raise", "skip", "fill"])
def test_a_format_that_does_not_exist_is_the_callers_mistake(on_error: Any) -> None:
    match = r"^pix_fmt must be one of FFmpeg's names, .* not 'rgb'\. Did you mean 'rgb24'"
    with pytest.raises(ValueError, match=match):
        sm.load_image_batch(SOURCES, width=8, height=8, pix_fmt="rgb", on_error=on_error)


@pytest.mark.parametrize(
    "size", [(40000, 40000), (100000, 100000), (2**31 - 1, 2**31 - 1), (20, 2**31 - 1)]
)
def test_a_size_that_no_image_can_have(size: tuple[int, int]) -> None:
    width, height = size
    match = (
        r"an image of \d+x\d+ cannot be made of one of 40x30: .* below 268435456.* smaller width="
    )
    with pytest.raises(sm.FilterError, match=match):
        sm.load_image(SOURCES[0], width=width, height=height)
    with pytest.raises(sm.FilterError, match=f"input 0 of the batch of 1: {match}") as caught:
        sm.load_image_batch([SOURCES[0]], width=width, height=height, on_error="skip")
    assert isinstance(caught.value, ValueError)
    assert caught.value.source == f"bytes of length {len(SOURCES[0])}"


def line(width: int, height: int, kind: int | str = 1) -> bytes:
    """Make a thin PNG of an orientation, or a GIF."""
    pixels = np.full((height, width, 3), 200, np.uint8)
    if isinstance(kind, str):
        return make_image(pixels, codec=kind)
    return png_with_exif(make_image(pixels), exif_block(kind))


# Without a graph (1), with one (6), and with a rate.
@each(
    "options, size, kind",
    [
        ({"width": 224, "height": 224, "scale_mode": "crop"}, (2, 16000), 1),
        ({"width": 224, "height": 224, "scale_mode": "crop"}, (2, 16000), 6),
        ({"width": 224, "height": 224, "scale_mode": "crop", "quality": "fast"}, (2, 16000), 1),
        ({"width": 224, "height": 224, "scale_mode": "crop", "quality": "fast"}, (2, 16000), "gif"),
        ({"width": 2000}, (2, 16000), 1),
        ({"width": 2000}, (2, 16000), "gif"),
        ({"height": 2000}, (16000, 2), 1),
        ({"height": 2000}, (16000, 2), 6),
        ({"filter_desc": "scale=-1:2000,format=rgb24"}, (16000, 2), 6),
        ({"filter_desc": "crop=20:20,format=rgb24"}, (16000, 2), "gif"),
    ],
)
def test_an_image_too_thin_is_a_failure_of_its_own(
    options: dict[str, Any], size: tuple[int, int], kind: int | str
) -> None:
    thin = line(*(size[::-1] if kind == 6 else size), kind)
    srcs = [SOURCES[0], thin, SOURCES[0]]
    batch = sm.load_image_batch(srcs, on_error="skip", **options)
    assert batch.indices == (0, 2)
    (failure,) = batch.failures
    assert (failure.index, type(failure.error)) == (1, sm.PictureSizeError)
    assert re.search(r"16000x2|2x16000", str(failure.error))
    assert sm.load_image_batch(srcs, on_error="fill", **options).valid.tolist() == [
        True,
        False,
        True,
    ]
    with pytest.raises(sm.PictureSizeError, match="input 1 of the batch of 3: an image of "):
        sm.load_image_batch(srcs, **options)


def test_an_error_of_another_kind_keeps_its_text() -> None:
    """Not its first argument, which is only a number for FFmpeg's errors."""
    error = _placed(av.error.ArgumentError(22, "Invalid argument"), 0, 1)
    assert type(error) is ValueError
    assert (
        str(error) == f"input 0 of the batch of 1: {av.error.ArgumentError(22, 'Invalid argument')}"
    )


def test_none_given() -> None:
    with pytest.raises(sm.ConvertError, match="there are no inputs to load"):
        sm.load_image_batch([])


@each(
    "one",
    [
        "a.png",
        b"x",
        memoryview(b"x"),
        array.array("B", b"x"),
        np.zeros(3, np.uint8),
        io.BytesIO(b"x"),
        Path("x"),
        None,
        3,
    ],
)
def test_one_source_is_no_sequence(one: Any) -> None:
    with pytest.raises(
        TypeError,
        match=f"a batch is a sequence of sources, .* not {type(one).__name__}; load_image takes",
    ):
        sm.load_image_batch(one)


def test_one_tensor_is_no_sequence() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match="not Tensor; load_image takes one"):
        sm.load_image_batch(torch.zeros(3, dtype=torch.uint8))


def test_arrays_may_hold_sources() -> None:
    rows = np.stack([np.frombuffer(SOURCES[0], np.uint8)] * 2)
    np.testing.assert_array_equal(np.asarray(sm.load_image_batch(rows)), PICTURES[[0, 0]])
    several = np.array([None, None])
    several[:] = SOURCES[:2]
    np.testing.assert_array_equal(np.asarray(sm.load_image_batch(several)), PICTURES[:2])


def test_a_path_of_no_letters_is_named_as_it_is() -> None:
    batch = sm.load_image_batch([SOURCES[0], ""], on_error="skip")
    assert batch.failures[0].source == ""


def test_mixed_sizes() -> None:
    srcs = [SOURCES[0], BAD, make_image(PICTURES[1][:20])]
    with pytest.raises(
        sm.ConvertError, match=r"input 0 \(.* is 40x30 rgb24, but input 2 .* is 40x20 rgb24.*width="
    ):
        sm.load_image_batch(srcs, on_error="skip")
    assert sm.load_image_batch(srcs, width=16, height=16, on_error="skip").shape[0] == 2


@pytest.mark.parametrize("policy", ["raise", "skip", "fill"])
def test_a_batch_ends_with_the_first_image_that_differs(policy: Any) -> None:
    """One array cannot contain both, so the remaining inputs are not even read."""
    seen: list[int] = []
    other = make_image(PICTURES[1][:20])
    srcs = [SOURCES[0], SOURCES[1], other, *(Watching(other, seen) for _ in range(5))]
    with pytest.raises(sm.ConvertError) as caught:
        sm.load_image_batch(srcs, on_error=policy)
    assert str(caught.value) == (
        f"bytes of length {len(other)}: input 0 (bytes of length {len(SOURCES[0])}) is 40x30 rgb24, but "
        f"input 2 (bytes of length {len(other)}) is 40x20 rgb24. One array holds one size and format: give "
        "width=, height= and pix_fmt=, or decode_packets a filter that scales and converts"
    )
    assert not seen


def test_misuse_is_raised_whatever_the_policy() -> None:
    with pytest.raises(TypeError, match="input 1 of the batch of 2: cannot read media from int"):
        sm.load_image_batch([SOURCES[0], 3], on_error="skip")
    with pytest.raises(sm.FilterError, match=r"input 0 of the batch of 32: .*cuda"):
        sm.load_image_batch(SOURCES, pix_fmt="cuda", on_error="skip")
    with pytest.raises(ValueError, match="on_error must be 'raise', 'skip' or 'fill', not 'drop'"):
        sm.load_image_batch(SOURCES, on_error="drop")
    with pytest.raises(TypeError, match="cuda_confg"):
        sm.load_image_batch(SOURCES, cuda_confg=None)
    with pytest.raises(ValueError, match=r"^width must be positive.*not 0"):
        sm.load_image_batch(SOURCES, width=0, height=8)


def test_a_failed_batch_gives_its_memory_back() -> None:
    pool = sm.StoragePool(PICTURES.nbytes, 1, pin_memory=False, on_exhausted="raise")
    for srcs in (with_bad(31), [SOURCES[0], make_image(PICTURES[1][:20])]):
        with pytest.raises(sm.MediaError):
            sm.load_image_batch(srcs, storage=pool)
        assert pool.num_free == 1
    small = sm.StoragePool(100, 1, pin_memory=False, on_exhausted="raise")
    with pytest.raises(sm.StorageTooSmallError, match=f"{PICTURES.nbytes} bytes.* 100"):
        sm.load_image_batch(SOURCES, storage=small)
    assert small.num_free == 1


@pytest.mark.parametrize("layout", [None, "NCHW"])
def test_rows_of_used_memory(layout: Any) -> None:
    """Old values of a block never appear in a batch: rows move up, or are zeros."""
    options: dict[str, Any] = {"width": 40, "height": 30, "layout": layout}
    bad = (0, 2, 3, 31)
    good = [position for position in range(COUNT) if position not in bad]
    wanted = np.asarray(sm.load_image_batch(SOURCES, **options))
    pool = sm.StoragePool(PICTURES.nbytes, 1, pin_memory=False, on_exhausted="raise")
    for policy in ("skip", "fill"):
        with sm.convert_array(np.full(PICTURES.nbytes, 255, np.uint8), pool):
            pass
        batch = sm.load_image_batch(with_bad(*bad), storage=pool, on_error=policy, **options)
        assert batch.array.flags.c_contiguous
        got = np.asarray(batch)[good] if policy == "fill" else np.asarray(batch)
        np.testing.assert_array_equal(got, wanted[good])
        assert policy == "skip" or not np.asarray(batch)[list(bad)].any()
        del got
        batch.release()
        del batch


class Watching(io.BytesIO):
    """An image that records, while it is read, how many frames are alive."""

    def __init__(self, content: bytes, seen: list[int]) -> None:
        super().__init__(content)
        self.seen = seen

    def read(self, size: int | None = -1, /) -> bytes:
        self.seen.append(sum(type(one) is av.VideoFrame for one in gc.get_objects()))
        return super().read(size)


@pytest.mark.parametrize("options", [{}, {"width": 20, "height": 20}, {"on_error": "fill"}])
def test_decoded_images_do_not_pile_up(options: dict[str, Any]) -> None:
    seen: list[int] = []
    gc.collect()
    sm.load_image_batch([Watching(source, seen) for source in SOURCES], **options)
    # The image that was decoded last.
    assert max(seen) - min(seen) <= 1
    assert len(seen) >= COUNT


def test_memory_is_taken_with_the_first_image_and_free_after_an_error() -> None:
    pool = sm.StoragePool(PICTURES.nbytes, 1, pin_memory=False, on_exhausted="raise")
    free: list[int] = []

    class Noting(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            free.append(pool.num_free)
            return super().read(size)

    srcs = [Noting(SOURCES[0]), Noting(SOURCES[1]), Noting(BAD)]
    with pytest.raises(sm.DemuxError, match="input 2 of the batch of 3"):
        sm.load_image_batch(srcs, storage=pool)
    assert free[0] == 1
    assert free[-1] == 0
    assert pool.num_free == 1  # while the error and its references are still alive


def test_failures_hold_no_inputs_alive() -> None:
    class Content(bytearray):
        pass

    content = Content(BAD)
    alive = weakref.ref(content)
    batch = sm.load_image_batch([SOURCES[0], content], on_error="skip")
    del content
    gc.collect()
    assert alive() is None
    assert len(batch.failures) == 1


def test_a_storage_in_use_is_not_overwritten() -> None:
    storage = sm.cpu_storage(PICTURES[:2].nbytes, pin_memory=False)
    first = sm.load_image_batch(SOURCES[:2], storage=storage)
    with pytest.warns(sm.StorageInUseWarning):
        second = sm.load_image_batch(SOURCES[2:4], storage=storage)
    np.testing.assert_array_equal(np.asarray(first), PICTURES[:2])
    np.testing.assert_array_equal(np.asarray(second), PICTURES[2:4])


@pytest.mark.parametrize("num_threads", [2, 3, COUNT + 1])
def test_threads_change_nothing(num_threads: int) -> None:
    """Rows, failures and errors of one batch are the same for any number of threads."""
    options: dict[str, Any] = {
        "width": 24,
        "height": 20,
        "flips": [i % 2 == 0 for i in range(COUNT)],
    }
    for bad in ((), (0,), (3, 17), (0, 1, 2), (COUNT - 1,), tuple(range(1, COUNT))):
        srcs = with_bad(*bad)
        for on_error in ("skip", "fill"):
            one, more = (
                sm.load_image_batch(srcs, on_error=on_error, num_threads=n, **options)
                for n in (1, num_threads)
            )
            np.testing.assert_array_equal(np.asarray(more), np.asarray(one))
            assert more.indices == one.indices
            assert [(f.index, f.source) for f in more.failures] == [
                (f.index, f.source) for f in one.failures
            ]
    threads = set(threading.enumerate())
    with pytest.raises(sm.DemuxError, match=f"input 0 of the batch of {COUNT}: "):
        sm.load_image_batch([BAD] * COUNT, num_threads=num_threads)
    with pytest.raises(sm.ConvertError, match=r"is 40x30 .* is 20x15"):
        sm.load_image_batch(
            [*SOURCES, make_image(np.zeros((15, 20, 3), np.uint8))], num_threads=num_threads
        )
    assert set(threading.enumerate()) <= threads, "all threads have ended"


class Meeting:
    """Images that can be read only while another thread reads one, too."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2)

    def source(self, content: bytes) -> io.BytesIO:
        barrier = self.barrier

        class Source(io.BytesIO):
            def read(self, size: int | None = -1) -> bytes:
                if not self.tell():
                    barrier.wait(30)
                return super().read(size)

        return Source(content)


def test_two_threads_decode_at_the_same_time() -> None:
    meeting = Meeting()
    batch = sm.load_image_batch([meeting.source(x) for x in SOURCES[:4]], num_threads=2)
    np.testing.assert_array_equal(np.asarray(batch), PICTURES[:4])


def test_ctrl_c_does_not_wait_for_a_source_that_another_thread_reads() -> None:
    together, leave = threading.Barrier(2), threading.Event()
    waited: list[bool] = []

    class Silent(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            together.wait(30)
            if threading.current_thread() is threading.main_thread():
                signal.raise_signal(signal.SIGINT)
            waited.append(leave.wait(5))
            return super().read(size)

    with pytest.raises(KeyboardInterrupt):
        sm.load_image_batch([Silent(SOURCES[0]), Silent(SOURCES[1])], num_threads=2)
    assert waited == []
    leave.set()


def test_a_batch_that_fails_in_threads_leaves_nothing_behind() -> None:
    pool = sm.StoragePool(PICTURES.nbytes, 1, pin_memory=False, on_exhausted="raise")
    seen = array.array("B", SOURCES[1])
    ref = weakref.ref(seen)
    with pytest.raises(sm.DemuxError) as caught:
        sm.load_image_batch([*SOURCES[2:], BAD], storage=pool, num_threads=2)
    del caught
    assert pool.num_free == 1
    batch = sm.load_image_batch([seen, BAD], on_error="skip", num_threads=2)
    del seen
    gc.collect()
    assert ref() is None
    assert batch.indices == (0,)


def test_a_batch_is_loaded_by_the_threads_that_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = threading.Thread.start
    started: list[threading.Thread] = []

    def start_two(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_two)
    batch = sm.load_image_batch(SOURCES[:8], num_threads=8)
    np.testing.assert_array_equal(np.asarray(batch), PICTURES[:8])
    assert [thread.is_alive() for thread in started] == [False, False]


def test_wrong_numbers_of_threads() -> None:
    with pytest.raises(ValueError, match="num_threads must be at least 1, not 0"):
        sm.load_image_batch(SOURCES, num_threads=0)
    with pytest.raises(TypeError, match=r"num_threads must be an int, not 1\.5"):
        sm.load_image_batch(SOURCES, num_threads=1.5)  # type: ignore[call-overload]


def test_batches_in_threads() -> None:
    results: dict[int, np.ndarray] = {}

    def load(start: int) -> None:
        results[start] = np.asarray(sm.load_image_batch(SOURCES[start : start + 8]))

    threads = [threading.Thread(target=load, args=(start,)) for start in range(0, COUNT, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for start, batch in results.items():
        assert [frame_index(row) for row in batch] == list(range(start, start + 8))


def test_fast_is_within_its_bound(media_dir) -> None:
    paths = sorted((media_dir / "photos").glob("*.jpg"))[:12]
    accurate, fast = (
        np.asarray(sm.load_image_batch(paths, width=224, height=224, quality=quality)).astype(int)
        for quality in ("accurate", "fast")
    )
    assert 0 < np.abs(fast - accurate).mean() <= 1.6


def _alive() -> int:
    kinds = (av.VideoFrame, av.Packet, sm.ImagePackets, sm.ImageFrames)
    return sum(type(one) in kinds for one in gc.get_objects())


@pytest.mark.parametrize(
    "options",
    [
        {"srcs": with_bad(31)},
        {"srcs": [BAD] * 3, "on_error": "fill"},
        {"srcs": [SOURCES[0], make_image(PICTURES[1][:20])], "on_error": "skip"},
        {"srcs": [*SOURCES, 3]},
        {"srcs": SOURCES, "crops": [None] * 31 + [(0, 0, 99, 9)]},
        {"srcs": SOURCES, "filter_desc": "nosuchfilter"},
        {"srcs": SOURCES, "storage": sm.cpu_storage(5, pin_memory=False)},
    ],
    ids=["bad", "all bad", "sizes", "no source", "crop", "filter", "storage"],
)
def test_a_failed_batch_leaves_no_frame_behind(options: dict[str, Any]) -> None:
    """Blocks come back when the error is dropped, without a garbage collection."""
    gc.collect()
    gc.disable()
    try:
        before = _alive()
        kept = sm.decode_packets(sm.demux_image(SOURCES[0]))
        assert _alive() > before
        del kept
        try:
            sm.load_image_batch(**options)
        except (sm.MediaError, TypeError):
            pass
        else:
            pytest.fail("nothing was raised")
        assert _alive() == before
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore:memory cannot be pinned")
def test_the_way_from_files_to_tensors(tmp_path) -> None:
    """The main use: from image files to a batch of tensors."""
    jpegs = [make_image(picture, codec="mjpeg") for picture in PICTURES[:4]]
    paths = [tmp_path / f"{index}.jpg" for index in range(4)]
    for path, jpeg in zip(paths, jpegs, strict=True):
        path.write_bytes(jpeg)
    batch = sm.load_image_batch(paths, width=224, height=224)
    assert (batch.shape, batch.dtype) == ((4, 224, 224, 3), np.uint8)
    planes = sm.load_image_batch(paths, width=224, height=224, pix_fmt="yuv420p")
    assert planes.shape == (4, 1, 336, 224)
    pool = sm.StoragePool(32 * 224 * 224 * 3, count=4, pin_memory=True)
    desc = sm.get_video_filter_desc(scale_width=224, scale_height=224)
    frames = [sm.decode_packets(sm.demux_image(path), desc) for path in paths]
    buffer = sm.convert_frames(frames, storage=pool)
    assert pool.num_free == 3
    np.testing.assert_array_equal(np.asarray(buffer), np.asarray(batch))
    (tmp_path / "speech.flac").write_bytes(
        make_audio(index_samples(16000, 2), 8000, codec="flac", format="flac")
    )
    waveform = sm.to_numpy(sm.load_audio(str(tmp_path / "speech.flac"), timestamp=(0.5, 1.5)))
    assert (waveform.shape, waveform.dtype) == ((2, 8000), np.float32)
    torch = pytest.importorskip("torch")
    tensor = sm.to_torch(batch)
    assert tensor.dtype == torch.uint8
    assert tensor.data_ptr() == batch.array.ctypes.data
