"""Statistics as people read them: aligned text, a table of rich in a terminal, HTML in a notebook."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from spdl_media._optional import is_available, require

_MARK = "<- bottleneck"
# Translucent, so that they suit light and dark notebooks.
_STYLES = {
    "table": "border-collapse:collapse;font-variant-numeric:tabular-nums",
    "cell": "padding:2px 8px;text-align:right;border-bottom:1px solid rgba(128,128,128,.3)",
    "first": "padding:2px 8px;text-align:left;border-bottom:1px solid rgba(128,128,128,.3)",
    "marked": "font-weight:bold;background:rgba(230,120,0,.25)",
}


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text with a heading and notes.

    Attributes:
        columns: What stands above the columns; the first holds names, the others numbers.
        rows: As many cells each.
        marked: Index of the row of the bottleneck, if it has one.
        before: Lines above the table.
        after: Lines below it.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    marked: int | None = None
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    def text(self) -> str:
        """The table as lines of aligned columns."""
        if not self.rows:
            return "\n".join([*self.before, *self.after])
        lines = [self.columns, *self.rows]
        first, *widths = (max(map(len, column)) for column in zip(*lines, strict=True))
        aligned = [
            "  ".join([row[0].ljust(first), *map(str.rjust, row[1:], widths)]) for row in lines
        ]
        if self.marked is not None:
            aligned[self.marked + 1] += f"  {_MARK}"
        return "\n".join([*self.before, *aligned, *self.after])

    def html(self) -> str:
        """The table as HTML that needs no style sheet."""
        head = "".join(_cell("th", number, cell) for number, cell in enumerate(self.columns))
        body = ""
        for index, row in enumerate(self.rows):
            marked = f' style="{_STYLES["marked"]}" title="bottleneck"'
            cells = "".join(_cell("td", number, cell) for number, cell in enumerate(row))
            body += f"<tr{marked if index == self.marked else ''}>{cells}</tr>"
        table = (
            f'<table style="{_STYLES["table"]}"><thead><tr>{head}</tr></thead>'
            f"<tbody>{body}</tbody></table>"
        )
        # A table that is wider than its place scrolls by itself.
        wide = f'<div style="overflow-x:auto">{table}</div>'
        return f"<div>{_paragraph(self.before)}{wide}{_paragraph(self.after)}</div>"

    def rich(self) -> Any:
        """The table as something that rich prints."""
        rich = require("rich-table", "A table in colour")
        # Names of stages are any text, so none of it is markup.
        plain = rich.Text
        table = rich.Table(
            title=plain("\n".join(self.before)),
            caption=plain("\n".join(self.after)),
            title_justify="left",
            caption_justify="left",
        )
        for number, column in enumerate(self.columns):
            table.add_column(plain(column), justify="right" if number else "left")
        for index, row in enumerate(self.rows):
            style = "bold yellow" if index == self.marked else None
            table.add_row(*map(plain, row), style=style)
        return table


def _cell(tag: str, number: int, text: str) -> str:
    return f'<{tag} style="{_STYLES["cell" if number else "first"]}">{escape(text)}</{tag}>'


def _paragraph(lines: Sequence[str]) -> str:
    return f"<p>{'<br>'.join(map(escape, lines))}</p>" if lines else ""


class Shown:
    """Base of what shows itself as a table: in a log, a terminal and a notebook."""

    __slots__ = ()

    def _tables(self) -> tuple[Table, ...]:
        raise NotImplementedError

    def show(self) -> None:
        """Print the table: in colour if rich is installed and this is a terminal, else as plain text."""
        if sys.stdout.isatty() and is_available("rich"):
            console = require("rich", "A table in colour").Console()
            console.print(self)
        else:
            print(self)  # noqa: T201  # what the caller asked for

    def __str__(self) -> str:
        return "\n".join(table.text() for table in self._tables())

    def __rich_console__(self, console: object, options: object) -> Iterator[Any]:
        return (table.rich() for table in self._tables())

    def _repr_html_(self) -> str:
        return "".join(table.html() for table in self._tables())
