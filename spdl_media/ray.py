"""Decoders for Ray Data: objects for ``Dataset.map_batches`` that turn a column of files into one of arrays.

They need nothing of Ray's, which calls them with batches of rows as dictionaries of NumPy arrays. An input
that cannot be decoded keeps its row: a column of its own says why.
"""

from __future__ import annotations

import contextlib
import io
import math
import wave
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Unpack

import numpy as np
import numpy.typing as npt

from spdl_media.arguments import AudioArguments, BatchArguments, VideoArguments
from spdl_media.arrays import to_numpy
from spdl_media.errors import ConvertError, MediaError, MissingDependencyError
from spdl_media.image_files import encode_image
from spdl_media.load import load_audio, load_image, load_image_batch, load_video
from spdl_media.storage import StoragePool, lease_memory
from spdl_media.timing import Timestamp, Window

__all__ = ("DecodeAudio", "DecodeImages", "DecodeVideo")

Array = npt.NDArray[Any]

# A row may have no input at all, or one that an option does not suit, such as the name of a decoder.
_OF_ROWS = (MediaError, TypeError, ValueError)

# Arrays on a device would not reach Ray.
_TAKEN = {"cuda", "cuda_config", "name", "on_error", "storage"}
# They are about files, and change nothing of an array whose shape was asked for.
_OF_FILES = {
    *("crops", "decode_config", "demux_config", "filter_desc", "flips", "num_threads", "rng"),
    *("stream_index", "timestamp"),
}


class _Decoder:
    """Calls a function of ``load`` for each row.

    Memory for arrays of one shape is leased from a pool that lives as long as the object.
    """

    #: What must be given for arrays of one shape.
    shape_options: ClassVar[Sequence[str]]

    def __init__(
        self, column: str | None, output: str, error: str, options: Mapping[str, Any]
    ) -> None:
        if taken := sorted(_TAKEN & options.keys()):
            raise TypeError(f"{type(self).__name__} takes no {taken[0]}=, which it chooses itself")
        self._column, self._output, self._error = column, output, error
        self._options = dict(options)
        self._has_one_shape = all(options.get(name) is not None for name in self.shape_options)
        # Of a file made here. It checks the options, before any row is read.
        plain = {name: value for name, value in options.items() if name not in _OF_FILES}
        if plain.get("on_short") == "error":
            plain["on_short"] = "repeat_last"
        self._blank: Array = np.zeros_like(to_numpy(self._load(self._made_file(), plain)))
        if "filter_desc" in options:
            # It may not suit that file, but options that exclude each other are refused here.
            with contextlib.suppress(MediaError):
                self._load(self._made_file(), {**plain, "filter_desc": options["filter_desc"]})
        self._pool: StoragePool | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_pool": None}

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Decode a batch of rows.

        Args:
            batch: Columns of equal length, as ``batch_format="numpy"`` gives them. It is not changed.

        Returns:
            The columns, with the arrays and the errors. Bytes that were decoded are left out; paths stay.

        Raises:
            TypeError: It is no dictionary.
            KeyError: It has no column of inputs.
            ValueError: It has a column already of the name of one that would be added.
            MissingDependencyError: A path is a URL, and fsspec is not installed.
        """
        if not isinstance(batch, Mapping):
            raise TypeError(
                f"a batch must be a dictionary of arrays, not {type(batch).__name__}: leave out batch_format="
            )
        names = ("bytes", "path") if self._column is None else (self._column,)
        name = next((name for name in names if name in batch), None)
        if name is None:
            raise KeyError(
                f"the rows have columns {list(batch)}, and none named {' or '.join(names)}"
            )
        for option, output in (("output", self._output), ("error", self._error)):
            if output in batch and output != name:
                raise ValueError(
                    f"the rows have a column {output!r} already, which would be lost: give {option}= another "
                    "name"
                )
        inputs = list(batch[name])
        errors = [""] * len(inputs)
        arrays = self._rows(inputs, errors) if self._has_one_shape else self._each(inputs, errors)
        # Of an empty batch only the name tells; its columns must be those of the others.
        is_path = all(isinstance(one, str) for one in inputs) if inputs else name == "path"
        # Bytes would double what Ray has to store.
        kept = {key: column for key, column in batch.items() if key != name or is_path}
        return {**kept, self._output: arrays, self._error: np.array(errors, object)}

    def _load(self, src: Any, options: Mapping[str, Any]) -> Any:
        """Load one input."""
        raise NotImplementedError

    def _made_file(self) -> bytes:
        """A file without content that matters."""
        return encode_image(np.zeros((64, 64, 3), np.uint8), "png")

    def _rows(self, inputs: list[Any], errors: list[str]) -> Array:
        """Load inputs into one array, zeros where there is an error."""
        shape = (len(inputs), *self._blank.shape)
        size = math.prod(shape) * self._blank.itemsize
        memory = lease_memory(size, self._storage(size))
        rows: Array = memory[:size].view(self._blank.dtype).reshape(shape)
        for row, array in enumerate(self._each(inputs, errors)):
            rows[row] = self._blank if errors[row] else array
        return rows

    def _each(self, inputs: list[Any], errors: list[str]) -> Array:
        """Load inputs into arrays of their own, without elements where there is an error."""
        arrays = np.empty(len(inputs), object)
        for row, src in enumerate(inputs):
            # With the dimensions of the others, because Ray wants one type for a column.
            arrays[row] = np.empty((0,) * self._blank.ndim, self._blank.dtype)
            try:
                array = to_numpy(self._load(src, self._options))
                if self._has_one_shape and _kind(array) != _kind(self._blank):
                    raise ConvertError(
                        f"it gives {_kind(array)}, which does not fit among {_kind(self._blank)}"
                    )
                arrays[row] = array
            # It is a MediaError as well, and each row would fail alike.
            except MissingDependencyError:
                raise
            except _OF_ROWS as error:
                errors[row] = _described(error)
        return arrays

    def _storage(self, size: int) -> StoragePool | None:
        """Memory that no earlier batch uses; ``None`` for fresh memory."""
        if self._pool is None or self._pool.nbytes < size:
            self._pool = StoragePool(max(size, 1), 2, pin_memory=False)
        # Ray may keep several batches until they make a block.
        return self._pool if self._pool.num_free else None


class DecodeImages(_Decoder):
    """Decode a column of images, for ``map_batches`` of a ``ray.data.Dataset``.

    With ``width=`` and ``height=`` the result is one array, ``(B, height, width, 3)`` uint8 for ``rgb24``,
    with zeros for what cannot be decoded. Without both, each row has an array of its own size, and one
    without elements for what cannot be decoded.

    Args:
        column: Column of the inputs: bytes, or paths and URLs. The default is ``bytes``, else ``path``.
        output: Name of the column of arrays.
        error: Name of the column of errors: text, empty where there is none.
        **options: Those of :func:`~spdl_media.load_image_batch` but ``on_error``, ``storage`` and ``cuda``.

    Raises:
        TypeError: An option has the wrong type or is not known.
        ValueError: An option is invalid.

    Thread safety: safe. An object can be pickled, and its copy begins without memory.

    Example:
        >>> decode = DecodeImages(width=224, height=224)
        >>> images = ray.data.read_binary_files(uri).map_batches(decode)  # doctest: +SKIP
    """

    shape_options = ("width", "height")

    def __init__(
        self,
        *,
        column: str | None = None,
        output: str = "image",
        error: str = "error",
        **options: Unpack[BatchArguments[None]],
    ) -> None:
        super().__init__(column, output, error, options)

    def _load(self, src: Any, options: Mapping[str, Any]) -> Any:
        one = {name: value for name, value in options.items() if name != "num_threads"}
        return load_image(src, **one)

    def _rows(self, inputs: list[Any], errors: list[str]) -> Array:
        size = len(inputs) * self._blank.nbytes
        options: Any = self._options
        try:
            batch = load_image_batch(
                inputs, storage=self._storage(size), on_error="fill", **options
            )
        except MissingDependencyError:
            raise
        # None could be decoded, or they do not fit into one array: by themselves they say why.
        except _OF_ROWS:
            return super()._rows(inputs, errors)
        for failure in batch.failures:
            errors[failure.index] = _described(failure.error)
        rows: Array = to_numpy(batch)
        return rows


class DecodeVideo(_Decoder):
    """Decode a column of videos, for ``map_batches`` of a ``ray.data.Dataset``.

    With ``width=``, ``height=``, ``num_frames=`` and ``on_short=`` the result is one array, ``(B, num_frames,
    height, width, 3)`` uint8 for ``rgb24``, with zeros for what cannot be decoded. Without all of them, each
    row has an array of its own size, and one without elements for what cannot be decoded.

    Args:
        timestamp: Window ``(start, end)`` in seconds, of each video; ``None``: all of it.
        column: As for :class:`DecodeImages`, as are ``output`` and ``error``.
        **options: Those of :func:`~spdl_media.load_video` but ``name``, ``storage`` and ``cuda``.

    Raises:
        TypeError: An option has the wrong type or is not known.
        ValueError: An option is invalid.

    Thread safety: safe. An object can be pickled, and its copy begins without memory.
    """

    shape_options = ("width", "height", "num_frames", "on_short")

    def __init__(
        self,
        *,
        timestamp: Timestamp | Window | None = None,
        column: str | None = None,
        output: str = "video",
        error: str = "error",
        **options: Unpack[VideoArguments[None]],
    ) -> None:
        super().__init__(column, output, error, {**options, "timestamp": timestamp})

    def _load(self, src: Any, options: Mapping[str, Any]) -> Any:
        return load_video(src, **options)


class DecodeAudio(_Decoder):
    """Decode a column of audio, for ``map_batches`` of a ``ray.data.Dataset``.

    With ``num_channels=``, ``num_samples=`` and ``on_short=`` the result is one array, ``(B, num_channels,
    num_samples)`` float32 for ``fltp``, with zeros for what cannot be decoded. Without all of them, each row
    has an array of its own size, and one without elements for what cannot be decoded.

    Args:
        timestamp: Window ``(start, end)`` in seconds, of each file; ``None``: all of it.
        column: As for :class:`DecodeImages`, as are ``output`` and ``error``.
        **options: Those of :func:`~spdl_media.load_audio` but ``name``, ``storage`` and ``cuda``. Give
            ``sample_rate``, or rows may have several.

    Raises:
        TypeError: An option has the wrong type or is not known.
        ValueError: An option is invalid.

    Thread safety: safe. An object can be pickled, and its copy begins without memory.
    """

    shape_options = ("num_channels", "num_samples", "on_short")

    def __init__(
        self,
        *,
        timestamp: Timestamp | Window | None = None,
        column: str | None = None,
        output: str = "audio",
        error: str = "error",
        **options: Unpack[AudioArguments[None]],
    ) -> None:
        super().__init__(column, output, error, {**options, "timestamp": timestamp})

    def _load(self, src: Any, options: Mapping[str, Any]) -> Any:
        return load_audio(src, **options)

    def _made_file(self) -> bytes:
        made = io.BytesIO()
        with wave.open(made, "wb") as writer:
            writer.setparams((1, 2, 8000, 0, "NONE", ""))
            writer.writeframes(bytes(2000))
        return made.getvalue()


def _kind(array: Array) -> str:
    return f"{array.shape} of {array.dtype}"


def _described(error: BaseException) -> str:
    # Without its source, which has columns of its own.
    return f"{type(error).__name__}: {getattr(error, 'message', error)}"
