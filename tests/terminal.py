"""Runs a command in a pseudo-terminal of any size, and reads its screen."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import termios
from collections.abc import Callable, Mapping, Sequence

import pyte


class Terminal:
    """A command in a pseudo-terminal.

    Attributes:
        screen: The current screen.
        output: The whole output of the command.
    """

    def __init__(
        self,
        command: Sequence[object],
        columns: int,
        environment: Mapping[str, str],
        rows: int = 50,
    ) -> None:
        self.screen = pyte.HistoryScreen(columns, rows, history=10_000)
        self._stream = pyte.ByteStream(self.screen)
        self.output = b""
        self._fd, child = pty.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self._process = subprocess.Popen(
            [os.fspath(one) if isinstance(one, os.PathLike) else str(one) for one in command],
            stdin=child,
            stdout=child,
            stderr=child,
            env={**environment, "TERM": "xterm-256color"},
            # In a session of its own, so that keys of the terminal become signals.
            preexec_fn=_take_terminal,  # noqa: PLW1509  # no threads hold locks that it needs
        )
        os.close(child)

    def read_until(self, is_enough: Callable[[str], bool]) -> None:
        """Read until ``is_enough(text)``, or until the command has ended."""
        while not is_enough(self.text()) and self._read():
            pass

    def press(self, keys: bytes) -> None:
        """Press keys: b"\\x03" is Ctrl-C."""
        os.write(self._fd, keys)

    def kill(self, signal: int) -> None:
        """Send a signal to the command, and wait for its end."""
        self._process.send_signal(signal)
        self.wait()

    def wait(self) -> int:
        """Read to the end; return the exit status."""
        while self._read():
            pass
        os.close(self._fd)
        return self._process.wait(60)

    def _read(self) -> bool:
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # Linux raises this when the other end is closed
            return False
        self.output += data
        self._stream.feed(data)
        return bool(data)

    def lines(self) -> list[str]:
        """Return the lines of the screen, after those that were scrolled off the top."""
        history = [
            "".join(line[column].data for column in range(self.screen.columns))
            for line in self.screen.history.top
        ]
        lines = [line.rstrip() for line in [*history, *self.screen.display]]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    def text(self) -> str:
        """Return the lines as one string."""
        return "\n".join(self.lines())


def _take_terminal() -> None:
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
