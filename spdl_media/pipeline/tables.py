"""Statistics as people read them: aligned text, a table of rich in a terminal, HTML in a notebook."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from spdl_media._optional import is_available, require

_MARK = "<- bottleneck"
# Translucent, so that it suits light and dark notebooks, whose own styles do the rest.
_MARKED = ' style="font-weight:bold;background:rgba(230,120,0,.25)" title="bottleneck"'


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

    @classmethod
    def of(
        cls, things: Sequence[Any], columns: Mapping[str, Callable[[Any], str]], **rest: Any
    ) -> Table:
        """A row for each of several things, by what makes the text of each column."""
        rows = tuple(tuple(cell(thing) for cell in columns.values()) for thing in things)
        return cls(tuple(columns), rows, **rest)

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
        rows = _html_row("th", self.columns)
        for index, row in enumerate(self.rows):
            rows += _html_row("td", row, _MARKED if index == self.marked else "")
        texts = (self.before, self.after)
        before, after = (f"<p>{'<br>'.join(map(escape, lines))}</p>" for lines in texts)
        # A table that is wider than its place scrolls by itself.
        return f'{before}<div style="overflow-x:auto"><table>{rows}</table></div>{after}'

    def rich(self) -> Any:
        """The table as something that rich prints.

        Raises:
            MissingPackageError: rich is not installed.
        """
        rich = require("rich-table", "A table in colour")
        # Names of stages are any text, so none of it is markup.
        plain = rich.Text
        title, caption = (plain("\n".join(lines)) for lines in (self.before, self.after))
        left = {"title_justify": "left", "caption_justify": "left"}
        table = rich.Table(title=title, caption=caption, **left)
        for number, column in enumerate(self.columns):
            table.add_column(plain(column), justify="right" if number else "left")
        for index, row in enumerate(self.rows):
            table.add_row(*map(plain, row), style="bold yellow" if index == self.marked else None)
        return table


def _html_row(tag: str, cells: Sequence[str], style: str = "") -> str:
    return f"<tr{style}>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"


class Shown:
    """Base of what shows itself as a table: in a log, a terminal and a notebook."""

    __slots__ = ()

    def _tables(self) -> tuple[Table, ...]:
        raise NotImplementedError

    def show(self) -> None:
        """Print the table: in colour if rich is installed and this is a terminal, else as plain text."""
        printed: Callable[[object], object] = print
        if sys.stdout.isatty() and is_available("rich"):
            printed = require("rich", "A table in colour").Console().print
        printed(self)

    def __str__(self) -> str:
        return "\n".join(table.text() for table in self._tables())

    def __rich_console__(self, console: object, options: object) -> Iterator[Any]:
        return map(Table.rich, self._tables())

    def _repr_html_(self) -> str:
        return "".join(table.html() for table in self._tables())
