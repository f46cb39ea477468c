"""Decoders for Ray Data: callables for ``Dataset.map_batches`` that decode a column of files to arrays.

They do not import Ray, which calls them with batches as dictionaries of NumPy arrays. An input that cannot
be decoded keeps its row, and a column of errors tells why.
"""

from __future__ import annotations

import contextlib
import io
import wave
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from spdl_media.arrays import to_numpy
from spdl_media.errors import ConvertError, MediaError, SourceError
from spdl_media.formats import Array
from spdl_media.image_files import encode_image
from spdl_media.load import load_audio, load_image, load_image_batch, load_video
from spdl_media.storage import StoragePool, new_array
from spdl_media.timing import parse_window

__all__ = ("DecodeAudio", "DecodeImages", "DecodeVideo")

# Errors of a single row. Those of damaged media are ValueErrors; a missing package concerns all rows.
_ROW_ERRORS = (SourceError, TypeError, ValueError)

# Options that the decoders set themselves. Not cuda, because Ray takes only host memory.
_RESERVED = {"cuda", "cuda_config", "name", "on_error", "storage"}
# Options that depend on the files and do not change the shape of the arrays.
_FILE_OPTIONS = {
    *("crops", "decode_config", "demux_config", "filter_desc", "flips", "num_threads", "rng"),
    *("stream_index", "timestamp"),
}


class _Decoder:
    """Base of the decoders: loads each row with a ``load_*`` function.

    Memory for arrays of one shape is leased from a pool that lives as long as the object.
    """

    #: Default name of the column of arrays.
    output: ClassVar[str]
    #: Options that must all be given for arrays of one shape.
    shape_options: ClassVar[Sequence[str]]
    #: Loads one input, with the options by name.
    _load: Callable[..., Any]

    def __init__(
        self,
        *,
        column: str | None = None,
        output: str | None = None,
        error: str = "error",
        **options: Any,
    ) -> None:
        if taken := sorted(_RESERVED & options.keys()):
            raise TypeError(f"{type(self).__name__} takes no {taken[0]}=, which it chooses itself")
        parse_window(options.get("timestamp"))
        self._column, self._output, self._error = column, output or self.output, error
        self._options = options
        self._has_one_shape = all(options.get(name) is not None for name in self.shape_options)
        # Loading a generated file checks the options, and gives the shape, before any row is read.
        plain = {name: value for name, value in options.items() if name not in _FILE_OPTIONS}
        if plain.get("on_short") == "error":
            plain["on_short"] = "repeat_last"
        self._blank: Array = np.zeros_like(to_numpy(self._load(self._example_file(), **plain)))
        if "filter_desc" in options:
            # The filters may not suit the generated file, but contradicting options raise here.
            with contextlib.suppress(MediaError):
                self._load(self._example_file(), **plain, filter_desc=options["filter_desc"])
        self._pool: StoragePool | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_pool": None}

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Decode a batch of rows.

        Args:
            batch: Columns of equal length, as from ``batch_format="numpy"``. It is not changed.

        Returns:
            The columns, plus those of arrays and errors. A column of bytes is dropped; paths are kept.

        Raises:
            TypeError: The batch is not a dictionary.
            KeyError: The batch has no column of inputs.
            ValueError: The batch already has a column named like one that would be added.
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
        # For an empty batch the name decides, so that it has the same columns as other batches.
        is_path = all(isinstance(one, str) for one in inputs) if inputs else name == "path"
        # Keeping the bytes would increase what Ray has to store.
        kept = {key: column for key, column in batch.items() if key != name or is_path}
        return {**kept, self._output: arrays, self._error: np.array(errors, object)}

    def _example_file(self) -> bytes:
        """Generate a file with arbitrary content."""
        return encode_image(np.zeros((64, 64, 3), np.uint8), "png")

    def _rows(self, inputs: list[Any], errors: list[str]) -> Array:
        """Load inputs into one array, with zeros for failed rows."""
        blank, storage = self._blank, self._storage(len(inputs) * self._blank.nbytes)
        rows = new_array((len(inputs), *blank.shape), blank.dtype.str, storage)
        for row, array in enumerate(self._each(inputs, errors)):
            rows[row] = blank if errors[row] else array
        return rows

    def _each(self, inputs: list[Any], errors: list[str]) -> Array:
        """Load inputs into separate arrays; failed rows get empty arrays."""
        arrays = np.empty(len(inputs), object)
        for row, src in enumerate(inputs):
            # Empty, but with the same number of dimensions, because Ray needs one type for a column.
            arrays[row] = np.empty((0,) * self._blank.ndim, self._blank.dtype)
            try:
                array = to_numpy(self._load(src, **self._options))
                if self._has_one_shape and _kind(array) != _kind(self._blank):
                    raise ConvertError(
                        f"it gives {_kind(array)}, which does not fit among {_kind(self._blank)}"
                    )
                arrays[row] = array
            except _ROW_ERRORS as error:
                errors[row] = _described(error)
        return arrays

    def _storage(self, size: int) -> StoragePool | None:
        """Return a pool with memory that no earlier batch uses; ``None`` to allocate new memory."""
        if self._pool is None or self._pool.nbytes < size:
            self._pool = StoragePool(max(size, 1), 2, pin_memory=False)
        # The pool may be empty, because Ray collects several batches for a block.
        return self._pool if self._pool.num_free else None


class DecodeImages(_Decoder):
    """Decode a column of images, for ``map_batches`` of a ``ray.data.Dataset``.

    With ``width=`` and ``height=`` the result is one array, ``(B, height, width, 3)`` uint8 for ``rgb24``,
    with zeros for rows that cannot be decoded. Otherwise each row has an array of its own size, which is
    empty if the row cannot be decoded.

    Args:
        column: Column of the inputs: bytes, or paths and URLs. The default is ``bytes``, else ``path``.
        output: Name of the column of arrays; the default is ``image``.
        error: Name of the column of errors: text, empty if there is none.
        **options: Options of :func:`~spdl_media.load_image_batch`, but not ``on_error``, ``storage`` and
            ``cuda``.

    Raises:
        TypeError: An option has the wrong type or is not known.
        ValueError: An option is invalid.

    Thread safety: safe. Picklable; a copy begins without memory.

    Example:
        >>> decode = DecodeImages(width=224, height=224)
        >>> images = ray.data.read_binary_files(uri).map_batches(decode)  # doctest: +SKIP
    """

    output = "image"
    shape_options = ("width", "height")

    def _load(self, src: Any, /, **options: Any) -> Any:
        options.pop("num_threads", None)
        return load_image(src, **options)

    def _rows(self, inputs: list[Any], errors: list[str]) -> Array:
        options: Any = {**self._options, "storage": self._storage(len(inputs) * self._blank.nbytes)}
        try:
            batch = load_image_batch(inputs, on_error="fill", **options)
        # None could be decoded, or they do not fit into one array: load them one by one for each error.
        except _ROW_ERRORS:
            return super()._rows(inputs, errors)
        for failure in batch.failures:
            errors[failure.index] = _described(failure.error)
        rows: Array = to_numpy(batch)
        return rows


class DecodeVideo(_Decoder):
    """Decode a column of videos, for ``map_batches`` of a ``ray.data.Dataset``.

    With all of ``width=``, ``height=``, ``num_frames=`` and ``on_short=`` the result is one array, ``(B,
    num_frames, height, width, 3)`` uint8 for ``rgb24``, with zeros for rows that cannot be decoded. Otherwise
    each row has an array of its own size, which is empty if the row cannot be decoded.

    Args:
        column: Column of the inputs: bytes, or paths and URLs. The default is ``bytes``, else ``path``.
        output: Name of the column of arrays; the default is ``video``.
        error: Name of the column of errors: text, empty if there is none.
        **options: Options of :func:`~spdl_media.load_video`, such as ``timestamp``, but not ``name``,
            ``storage`` and ``cuda``.

    Raises:
        TypeError: An option has the wrong type or is not known.
        ValueError: An option is invalid.

    Thread safety: safe. Picklable; a copy begins without memory.
    """

    output = "video"
    shape_options = ("width", "height", "num_frames", "on_short")
    _load = staticmethod(load_video)


class DecodeAudio(_Decoder):
    """Decode a column of audio, for ``map_batches`` of a ``ray.data.Dataset``.

    With all of ``num_channels=``, ``num_samples=`` and ``on_short=`` the result is one array, ``(B,
    num_channels, num_samples)`` float32 for ``fltp``, with zeros for rows that cannot be decoded. Otherwise
    each row has an array of its own size, which is empty if the row cannot be decoded.

    Args:
        column: Column of the inputs: bytes, or paths and URLs. The default is ``bytes``, else ``path``.
        output: Name of the column of arrays; the default is ``audio``.
        error: Name of the column of errors: text, empty if there is none.
        **options: Options of :func:`~spdl_media.load_audio`, such as ``timestamp``, but not ``name``,
            ``storage`` and ``cuda``. Give ``sample_rate``, or sample rates may differ between rows.

    Raises:
        TypeError: An option has the wrong type or is not known.
        ValueError: An option is invalid.

    Thread safety: safe. Picklable; a copy begins without memory.
    """

    output = "audio"
    shape_options = ("num_channels", "num_samples", "on_short")
    _load = staticmethod(load_audio)

    def _example_file(self) -> bytes:
        made = io.BytesIO()
        with wave.open(made, "wb") as writer:
            writer.setparams((1, 2, 8000, 0, "NONE", ""))
            writer.writeframes(bytes(2000))
        return made.getvalue()


def _kind(array: Array) -> str:
    return f"{array.shape} of {array.dtype}"


def _described(error: BaseException) -> str:
    # error.message, without the name of the source, which the row has in other columns.
    return f"{type(error).__name__}: {getattr(error, 'message', error)}"
