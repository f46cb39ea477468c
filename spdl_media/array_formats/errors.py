"""What is wrong with an array file or an archive, and where in it."""

from __future__ import annotations

from spdl_media.errors import DecodeError

__all__ = ("ArrayFormatError",)


class ArrayFormatError(DecodeError):
    """An array file or archive is damaged, cut short, lies about its sizes, or is of a kind that is not read.

    Attributes:
        member: The name of the array or file inside the archive, if one is concerned.
        offset: Where in the source, in bytes from its start, if known.
    """

    member: str | None
    offset: int | None

    def __init__(
        self,
        message: str = "",
        *,
        source: str | None = None,
        member: str | None = None,
        offset: int | None = None,
    ) -> None:
        super().__init__(message, source=source)
        self.member = member
        self.offset = offset

    def __str__(self) -> str:
        text = super().__str__() if self.member is None else self._with_member()
        return text if self.offset is None else f"{text} (at byte {self.offset})"

    def _with_member(self) -> str:
        message = str(self.args[0]) if self.args else ""
        where = f"{self.source}: " if self.source else ""
        return f"{where}member {self.member!r}: {message}"
