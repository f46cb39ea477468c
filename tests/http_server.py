"""An HTTP server on loopback that serves ranges of files in memory, and counts requests and bytes."""

from __future__ import annotations

import gzip
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class HTTPFiles:
    """Files to serve; per path, the bytes of bodies sent and the number of requests.

    The next ``busy`` requests are answered by ``refusal``. Instead of a requested range from ``start`` to
    ``stop``, ``answer(start, stop)`` is sent, of which only ``cut`` bytes arrive. With ``zips``, bodies are
    compressed, although HEAD states the size of the file.
    """

    files: dict[str, bytes]
    ranges: bool = True
    sizes: bool = True
    url: str = ""
    busy: int = 0
    refusal: int = 503
    etag: str = ""
    modified: str = ""
    cut: int | None = None
    zips: bool = False
    content_range: str = "bytes {}-{}/{}"
    answer: Callable[[int, int], tuple[int, int]] = lambda start, stop: (start, stop)
    bytes_sent: Counter[str] = field(default_factory=Counter)
    requests: Counter[str] = field(default_factory=Counter)

    def reset(self) -> None:
        self.bytes_sent.clear()
        self.requests.clear()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    served: HTTPFiles

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.lstrip("/")
        is_busy = self.served.busy > 0
        self.served.busy -= is_busy
        if is_busy or path not in self.served.files:
            self.served.requests[path] += not is_busy
            self.send_response(self.served.refusal if is_busy else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        content = self.served.files[path]
        start, stop = self._range(len(content))
        body = memoryview(content)[start:stop]
        self.send_response(206 if len(body) < len(content) else 200)
        if self.served.zips and with_body:
            body = memoryview(gzip.compress(body))
            self.send_header("Content-Encoding", "gzip")
        if self.served.etag:
            self.send_header("ETag", self.served.etag)
            self.send_header("Last-Modified", self.served.modified)
        if self.served.ranges:
            self.send_header("Accept-Ranges", "bytes")
            if stated := self.served.content_range.format(start, stop - 1, len(content)):
                self.send_header("Content-Range", stated)
            self.send_header("Content-Length", str(len(body)))
        elif self.served.sizes:
            self.send_header("Content-Length", str(len(body)))
        else:
            self.send_header("Connection", "close")  # without a length, closing ends the body
        self.end_headers()
        self.served.requests[path] += 1
        if with_body:
            self.served.bytes_sent[path] += len(body)
            try:
                self.wfile.write(body[: self.served.cut])
                self.close_connection |= self.served.cut is not None
            except ConnectionError:
                self.close_connection = True  # the client has closed the connection

    def _range(self, size: int) -> tuple[int, int]:
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not asked or not self.served.ranges:
            return 0, size
        return self.served.answer(int(asked[1]), min(size, int(asked[2] or size) + 1))

    def log_message(self, format: str, *args: object) -> None:
        """Write no log."""


@contextmanager
def serve(
    files: Mapping[str, bytes], *, ranges: bool = True, sizes: bool | None = None
) -> Iterator[HTTPFiles]:
    """Serve files at ``url`` until the block ends. Without ``ranges``, sizes are sent only with ``sizes``."""
    served = HTTPFiles(dict(files), ranges, ranges if sizes is None else sizes)
    handler = type("Handler", (_Handler,), {"served": served})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    served.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
