"""What :func:`decode_packets` and the streaming decoders share: the default filter, and checks."""

from __future__ import annotations

from enum import Enum
from typing import Final

from spdl_media.codec import Codec
from spdl_media.config import DecodeConfig
from spdl_media.errors import DecodeError
from spdl_media.filter_desc import get_audio_filter_desc, get_video_filter_desc
from spdl_media.operations import Quality
from spdl_media.packets import PacketMetadata, Packets, metadata_of


class Default(Enum):
    """Stands for an argument that was not given, where ``None`` means something else."""

    FILTER = "the default filter"

    def __repr__(self) -> str:
        return f"<{self.value}>"


DEFAULT_FILTER: Final = Default.FILTER


def picture_filter(filter_desc: str | Default | None, quality: Quality = "auto") -> str | None:
    """The description for pictures: ``rgb24`` of this quality, if none was given."""
    if isinstance(filter_desc, Default):
        return get_video_filter_desc(quality=quality)
    return filter_desc


def sample_filter(filter_desc: str | Default | None) -> str | None:
    """The description for sound: ``fltp``, if none was given."""
    return get_audio_filter_desc() if isinstance(filter_desc, Default) else filter_desc


def cut_short(facts: PacketMetadata, codec: Codec) -> DecodeError:
    """The error for packets whose file is known to be cut short."""
    return DecodeError(
        f"the {codec.name} data is cut short: {facts.incomplete}. decode_config(on_corrupt='keep') "
        "decodes what is there, as far as the decoder can",
        source=facts.source,
    )


def cut_short_error(packets: Packets, config: DecodeConfig) -> DecodeError | None:
    """The same error, if these packets and options call for one."""
    facts = metadata_of(packets)
    if facts.incomplete is None or config.on_corrupt != "raise":
        return None
    return cut_short(facts, packets.codec)
