"""Configs are checked when they are made, frozen, and picklable."""

from __future__ import annotations

import json
import pickle
from dataclasses import FrozenInstanceError, asdict
from typing import Any

import numpy as np
import pytest
from effort import each

from spdl_media.config import DecodeConfig, DemuxConfig, decode_config, demux_config

DEMUX = demux_config(format="s16le", format_options={"sample_rate": 8000}, buffer_size=4096)
DECODE = decode_config(
    decoder="h264", decoder_options={"threads": 2}, orient=False, on_corrupt="keep"
)


def test_factories_without_arguments_give_the_defaults() -> None:
    assert demux_config() == DemuxConfig()
    assert decode_config() == DecodeConfig()


def test_factories_fill_every_field() -> None:
    assert (DEMUX.format, dict(DEMUX.format_options)) == ("s16le", {"sample_rate": "8000"})
    assert DEMUX.buffer_size == 4096
    assert (DECODE.decoder, dict(DECODE.decoder_options)) == ("h264", {"threads": "2"})
    assert (DECODE.orient, DECODE.on_corrupt) == (False, "keep")
    assert (DECODE.downscale, decode_config(downscale="dct").downscale) == (None, "dct")


@each(
    "value, text",
    [("8k", "8k"), (8000, "8000"), (0.5, "0.5"), (True, "1"), (False, "0"), (np.int64(3), "3")],
)
def test_option_values_become_text(value: Any, text: str) -> None:
    assert demux_config(format_options={"name": value}).format_options["name"] == text
    assert decode_config(decoder_options={"name": value}).decoder_options["name"] == text


@pytest.mark.parametrize(
    "config",
    [DEMUX, DECODE, decode_config(downscale="dct")],
    ids=["demux", "decode", "downscale"],
)
def test_pickle_round_trip(config: Any) -> None:
    again = pickle.loads(pickle.dumps(config))
    assert again == config
    assert repr(again) == repr(config)


@pytest.mark.parametrize("config", [DEMUX, DECODE], ids=["demux", "decode"])
def test_fields_are_frozen(config: Any) -> None:
    for name in config.__dataclass_fields__:
        with pytest.raises(FrozenInstanceError, match=name):
            setattr(config, name, None)


def test_configs_are_plain_data() -> None:
    # A run's settings are logged as JSON.
    for config in (DEMUX, DECODE):
        values = json.loads(json.dumps(asdict(config)))
        assert type(config)(**values) == config


def test_options_are_our_own() -> None:
    given = {"threads": "2"}
    config = decode_config(decoder_options=given)
    given["threads"] = "3"
    assert config.decoder_options["threads"] == "2"


@pytest.mark.parametrize("size", [0, -1, 1023])
def test_buffer_size_must_be_large_enough(size: int) -> None:
    with pytest.raises(ValueError, match=f"buffer_size must be at least 1024 bytes, not {size}"):
        demux_config(buffer_size=size)


@pytest.mark.parametrize("size", [4096.0, "4096", None, True])
def test_buffer_size_must_be_an_int(size: Any) -> None:
    with pytest.raises(TypeError, match="buffer_size must be an int, not"):
        demux_config(buffer_size=size)


def test_format_and_decoder_must_be_names() -> None:
    with pytest.raises(TypeError, match="format must be a str, such as 'mp4', not 7"):
        demux_config(format=7)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(TypeError, match="decoder must be a str, such as 'h264', not 7"):
        decode_config(decoder=7)  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.parametrize("value", [None, 1, "yes"])
def test_orient_must_be_a_bool(value: Any) -> None:
    with pytest.raises(TypeError, match="orient must be True or False"):
        decode_config(orient=value)


@pytest.mark.parametrize("value", ["skip", "", None, "RAISE"])
def test_on_corrupt_must_be_one_of_three(value: Any) -> None:
    with pytest.raises(ValueError, match=r"on_corrupt must be 'raise', 'keep' or 'drop'"):
        decode_config(on_corrupt=value)


@each("make", ["format_options", "decoder_options"])
@each("options", [{1: "a"}, {"a": None}, {"a": [1]}, {"a": b"1"}])
def test_option_names_and_values_must_be_text_or_numbers(make: str, options: Any) -> None:
    factory: Any = demux_config if make == "format_options" else decode_config
    with pytest.raises(TypeError, match=f"{make} maps str to str or numbers, not"):
        factory(**{make: options})


def test_options_must_be_a_mapping() -> None:
    with pytest.raises(TypeError, match="format_options must be a mapping"):
        demux_config(format_options=["a=b"])  # type: ignore[arg-type]  # wrong on purpose


def test_storage_options_are_kept_and_not_shown() -> None:
    given = {"simplecache": {"cache_storage": "/scratch"}, "key": "sesame"}
    config = demux_config(storage_options=given)
    assert pickle.loads(pickle.dumps(config)) == config != demux_config()
    given["key"] = "other"
    assert config.storage_options["key"] == "sesame"
    assert "sesame" not in repr(config)


@pytest.mark.parametrize("options", [{1: "a"}, ["anon"], "anon=1"])
def test_storage_options_must_be_a_mapping_by_name(options: Any) -> None:
    with pytest.raises(TypeError, match="storage_options must be a mapping of fsspec's options"):
        demux_config(storage_options=options)


def test_factories_take_keywords_alone() -> None:
    with pytest.raises(TypeError, match="positional"):
        demux_config("mp4")  # type: ignore[misc]  # wrong on purpose
    with pytest.raises(TypeError, match="positional"):
        decode_config("h264")  # type: ignore[misc]  # wrong on purpose
