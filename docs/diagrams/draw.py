"""Draws the diagrams of the documentation, as SVG: ``python docs/diagrams/draw.py``.

Colours are readable on white and on black, so that one file serves both.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
# Filled boxes with white text, and gray lines.
BLUE, GREEN, ORANGE, PURPLE, GRAY = "#2f6db5", "#2e7d4f", "#b5651d", "#7a4fa3", "#7a828e"
FONT = "font-family='system-ui, sans-serif' font-size='14'"


class Drawing:
    """Boxes, arrows and labels, in pixels."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.size = width, height
        self.parts = [f"<title>{escape(title)}</title>"]

    def box(self, x: int, y: int, width: int, height: int, text: str, color: str = BLUE) -> None:
        """A filled box with lines of text in its middle."""
        self.parts.append(
            f"<rect x='{x}' y='{y}' width='{width}' height='{height}' rx='6' fill='{color}'/>"
        )
        lines = text.split("\n")
        for number, line in enumerate(lines):
            middle = y + height / 2 + (number - (len(lines) - 1) / 2) * 18 + 5
            self.text(x + width // 2, middle, line, "#ffffff", "middle", small=number > 0)

    def text(
        self,
        x: int,
        y: float,
        text: str,
        color: str = GRAY,
        anchor: str = "start",
        *,
        small: bool = False,
    ) -> None:
        """A line of text."""
        size = " font-size='12'" if small else ""
        self.parts.append(
            f"<text x='{x}' y='{y:g}' fill='{color}' text-anchor='{anchor}'{size}>{escape(text)}</text>"
        )

    def arrow(self, *points: tuple[int, int], dashed: bool = False) -> None:
        """A line from point to point, with a head at its end."""
        path = " ".join(f"{x},{y}" for x, y in points)
        dash = " stroke-dasharray='5 4'" if dashed else ""
        self.parts.append(
            f"<polyline points='{path}' fill='none' stroke='{GRAY}' stroke-width='2'{dash} "
            "marker-end='url(#head)'/>"
        )

    def line(self, x1: int, y1: int, x2: int, y2: int, color: str = GRAY) -> None:
        """A plain line."""
        self.parts.append(
            f"<line x1='{x1}' y1='{y1}' x2='{x2}' y2='{y2}' stroke='{color}' stroke-width='2'/>"
        )

    def frame(self, x: int, y: int, width: int, height: int, text: str) -> None:
        """A dashed frame with a label in its upper left corner."""
        self.parts.append(
            f"<rect x='{x}' y='{y}' width='{width}' height='{height}' rx='8' fill='none' "
            f"stroke='{GRAY}' stroke-dasharray='3 3'/>"
        )
        self.text(x + 10, y + 18, text, small=True)

    def svg(self) -> str:
        """The whole file."""
        width, height = self.size
        head = (
            "<defs><marker id='head' markerWidth='9' markerHeight='8' refX='8' refY='4' orient='auto'>"
            f"<path d='M0,0 L9,4 L0,8 z' fill='{GRAY}'/></marker></defs>"
        )
        return (
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' "
            f"width='{width}' height='{height}' {FONT}>\n"
            + "\n".join([head, *self.parts])
            + "\n</svg>\n"
        )


def data_flow() -> Drawing:
    """From a file to an array."""
    drawing = Drawing(760, 230, "Data flow from a source to an array")
    steps = [
        ("source\npath, URL, bytes", GRAY),
        ("packets\ncoded data", BLUE),
        ("frames\nFFmpeg's planes", GREEN),
        ("buffer\none array", ORANGE),
        ("array\nyour library", GRAY),
    ]
    for number, (text, color) in enumerate(steps):
        drawing.box(10 + number * 150, 60, 130, 60, text, color)
    for number, verb in enumerate(("demux", "decode", "convert", "view")):
        drawing.arrow((140 + number * 150, 90), (158 + number * 150, 90))
        drawing.text(149 + number * 150, 50, verb, anchor="middle")
    notes = ("read", "nothing is copied", "filters, upright", "the one copy", "no copy")
    for number, note in enumerate(notes):
        drawing.text(75 + number * 150, 140, note, anchor="middle", small=True)
    drawing.arrow((225, 165), (225, 195), (535, 195), (535, 165))
    drawing.text(
        380,
        215,
        "load_*: one call, each frame is written directly to its row",
        anchor="middle",
        small=True,
    )
    drawing.text(
        380,
        20,
        "FFmpeg releases the GIL in demux and decode",
        anchor="middle",
        small=True,
    )
    return drawing


def window() -> Drawing:
    """The packets and frames of a time window."""
    drawing = Drawing(760, 220, "A half-open time window, and the frames decoded for it")
    left, step = 40, 34
    for number in range(20):
        inside, lead = 9 <= number < 15, 4 <= number < 9
        color = GREEN if inside else ORANGE if lead else GRAY
        drawing.box(left + number * step, 70, 28, 40, "K" if number in (4, 14) else "", color)
    drawing.line(left, 130, left + 20 * step, 130)
    for number in range(0, 21, 5):
        x = left + number * step
        drawing.line(x, 125, x, 135)
        drawing.text(x, 152, f"{number / 10:.1f} s", anchor="middle", small=True)
    start, end = left + 9 * step - 3, left + 15 * step - 3
    for x, label in ((start, "start = 0.9: inside"), (end, "end = 1.5: outside")):
        drawing.line(x, 50, x, 130, GREEN)
        drawing.text(x + 4, 44, label, GREEN, small=True)
    for x, color, text in (
        (40, ORANGE, "decoded as references, then dropped"),
        (400, GREEN, "frames of the window"),
        (590, GRAY, "not read or decoded"),
    ):
        drawing.box(x, 180, 14, 14, "", color)
        drawing.text(x + 20, 192, text, small=True)
    drawing.text(40, 24, "K: a key frame, where decoding can start")
    return drawing


def ownership() -> Drawing:
    """The lease of a block of a pool."""
    drawing = Drawing(760, 260, "How a block of a pool is leased and returned")
    drawing.frame(10, 20, 200, 210, "StoragePool(size, count=3)")
    for number, (text, color) in enumerate(
        (("block, free", GRAY), ("block, free", GRAY), ("block, leased", ORANGE))
    ):
        drawing.box(30, 50 + number * 58, 160, 46, text, color)
    drawing.box(300, 166, 140, 46, "CPUBuffer", ORANGE)
    drawing.arrow((190, 180), (298, 180))
    drawing.text(244, 172, "lease", anchor="middle", small=True)
    for y, text in ((60, "np.asarray(buffer)"), (113, "to_torch(buffer)"), (166, "buffer[3]")):
        drawing.box(570, y, 170, 46, text, BLUE)
        drawing.arrow((440, 189), (500, 189), (500, y + 23), (568, y + 23))
    drawing.text(505, 232, "views: no copy", anchor="start", small=True)
    drawing.arrow((655, 58), (655, 38), (250, 38), (250, 70), (192, 70), dashed=True)
    drawing.text(452, 30, "returned when the last of them is deleted", anchor="middle", small=True)
    return drawing


def threads() -> Drawing:
    """The threads of a pipeline and their work."""
    drawing = Drawing(760, 300, "The threads of a pipeline")
    label = "stages: coroutines run on one event loop; the thread that made a result passes it on"
    drawing.frame(10, 10, 740, 84, label)
    for x, text in ((30, "source"), (215, "download"), (400, "decode"), (585, "batch")):
        drawing.box(x, 40, 140, 40, text, BLUE)
    for x in (170, 355, 540):
        drawing.arrow((x, 60), (x + 43, 60))
    drawing.frame(
        10, 110, 740, 84, "num_threads: plain functions; FFmpeg and NumPy release the GIL"
    )
    for number in range(4):
        drawing.box(210 + number * 90, 140, 80, 40, "decode" if number < 3 else "batch", GREEN)
    drawing.box(30, 140, 140, 40, "source thread", GREEN)
    drawing.arrow((470, 82), (470, 138))
    drawing.frame(10, 210, 360, 80, "executor=: processes for CPU-bound Python")
    drawing.box(30, 240, 150, 38, "worker process", PURPLE)
    drawing.box(200, 240, 150, 38, "worker process", PURPLE)
    drawing.frame(390, 210, 360, 80, "your thread")
    drawing.box(410, 240, 320, 38, "for batch in pipeline: train(batch)", ORANGE)
    drawing.arrow((745, 60), (756, 60), (756, 259), (732, 259))
    return drawing


def stopping() -> Drawing:
    """How a run ends."""
    drawing = Drawing(760, 250, "How a pipeline stops")
    for number, text in enumerate(
        (
            "end of the source",
            "break, exception, Ctrl-C",
            "stop(), end of with",
            "too many failures",
            "garbage collection, exit",
        )
    ):
        drawing.box(10, 10 + number * 47, 200, 38, text, GRAY if number else GREEN)
        drawing.arrow((210, 29 + number * 47), (270, 125))
    drawing.box(275, 95, 140, 60, "stop\nno new call starts", ORANGE)
    for y, text in (
        (20, "coroutines: cancelled"),
        (78, "plain calls: run to their end,\nnot waited for"),
        (136, "processes: terminated"),
        (194, "after a failure: earlier\nresults are delivered"),
    ):
        drawing.box(480, y, 250, 44, text, BLUE)
        drawing.arrow((415, 125), (478, y + 22))
    return drawing


DIAGRAMS = {
    "data_flow": data_flow,
    "window": window,
    "ownership": ownership,
    "threads": threads,
    "stopping": stopping,
}

if __name__ == "__main__":
    for name, draw in DIAGRAMS.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")
