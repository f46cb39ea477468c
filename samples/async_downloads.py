"""Download many images at a time from a web server, and decode them in threads.

Command::

    python samples/async_downloads.py

It starts its own slow web server on this machine. Of 60 images, one is missing and one request is never
answered. It needs aiohttp.

Output::

    58 images in batches of 16, 16, 16, 10: (16, 112, 112, 3) uint8
    failed: download 2 (404 Not Found, TimeoutError), decode 0
    downloads at the same time: more than 8

Downloads wait in an event loop and need no threads. Two threads decode.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import numpy as np
from aiohttp import web
from made_media import make_photos

import spdl_media as sm
from spdl_media.pipeline import PipelineBuilder

NUM_IMAGES, MISSING, SILENT = 60, 7, 23


class Server:
    """Serves the files of a folder, each after a delay."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths
        self.now = self.most = 0
        self.over = asyncio.Event()

    async def get(self, request: web.Request) -> web.StreamResponse:
        """Answer a request."""
        number = int(request.match_info["number"])
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            # Simulates a slow network.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.over.wait(), 60 if number == SILENT else 0.1)
        finally:
            self.now -= 1
        if number == MISSING:
            raise web.HTTPNotFound
        return web.FileResponse(self.paths[number])

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """Serve on a free port, and yield the address."""
        app = web.Application()
        app.router.add_get("/{number}.jpg", self.get)
        runner = web.AppRunner(app, shutdown_timeout=0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield "http://{}:{}".format(*runner.addresses[0])
        finally:
            self.over.set()
            await runner.cleanup()


async def load(urls: list[str]) -> None:
    """Run the pipeline. The rest of this file is the server."""

    async def download(url: str) -> bytes:
        # The pipeline has its own event loop, so it cannot use a session of this one.
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            response.raise_for_status()
            return await response.read()

    def decode(data: bytes) -> sm.CPUBuffer:
        return sm.load_image(data, width=112, height=112)

    pipeline = (
        PipelineBuilder()
        .add_source(urls)
        .pipe(download, concurrency=32, timeout=5)
        .pipe(decode, concurrency=2)
        .aggregate(16)
        .pipe(sm.collate)
        .add_sink(2)
        .build(num_threads=2)
    )
    batches = [np.asarray(batch) async for batch in pipeline]
    sizes = ", ".join(str(len(batch)) for batch in batches)
    print(
        f"{sum(map(len, batches))} images in batches of {sizes}: {batches[0].shape} {batches[0].dtype}"
    )
    reasons = sorted(
        f"{error.status} {error.message}"
        if isinstance(error := failure.exception, aiohttp.ClientResponseError)
        else type(error).__name__
        for failure in pipeline.failures
    )
    counts = pipeline.failure_counts
    print(
        f"failed: download {counts['download']} ({', '.join(reasons)}), decode {counts['decode']}"
    )


async def main() -> None:
    """Run the program; see the module."""
    with tempfile.TemporaryDirectory() as folder:
        server = Server(make_photos(Path(folder), NUM_IMAGES))
        async with server.running() as address:
            await load([f"{address}/{number}.jpg" for number in range(NUM_IMAGES)])
    print(f"downloads at the same time: {'more than 8' if server.most > 8 else server.most}")


if __name__ == "__main__":
    asyncio.run(main())
