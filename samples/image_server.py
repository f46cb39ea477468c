"""Serve thumbnails from an asyncio web server. Decoding runs in threads, and stops after a timeout.

Command::

    python samples/image_server.py [PORT]

Without PORT it serves on a free port, requests some thumbnails itself, and exits. With PORT it serves
``GET /FILE?width=N`` of ``samples/media`` until Ctrl-C.

Output::

    /technician_turned.jpg?width=128   200  image/jpeg, 128x72
    /nasa_13013.mp4?width=96           200  image/jpeg, 96x54
    /missing.jpg                       404  no such file
    /README.md                         415  not an image or a video
    /technician.jpg?width=99999999     400  width is a number from 1 to 4096
    8 thumbnails at the same time: 8 answers of 200
    other tasks ran meanwhile: True
"""

from __future__ import annotations

import asyncio
import sys
import urllib.parse
from http import HTTPStatus
from pathlib import Path

import spdl_media as sm

MEDIA = Path(__file__).resolve().parent / "media"
WIDEST, SECONDS = 4096, 20


async def thumbnail(path: Path, width: int) -> bytes:
    """Return a JPEG of an image, or of the first frame of a video."""
    try:
        image = await sm.async_load_image(path, width=width)
    except sm.MediaError:
        video = await sm.async_load_video(path, (0, 0.1), width=width)
        image = video[0]
    return await asyncio.to_thread(sm.encode_image, image)


async def answer(target: str) -> tuple[int, str, bytes]:
    """Return the status, type and content for the target of a ``GET`` request."""
    url = urllib.parse.urlsplit(target)
    width = urllib.parse.parse_qs(url.query).get("width", ["256"])[0]
    if not width.isascii() or not width.isdigit() or not 1 <= int(width) <= WIDEST:
        return 400, "text/plain", f"width is a number from 1 to {WIDEST}".encode()
    # Compare names, so that no path leads out of the folder.
    files = {path.name: path for path in MEDIA.iterdir()}
    path = files.get(urllib.parse.unquote(url.path).removeprefix("/"))
    if path is None:
        return 404, "text/plain", b"no such file"
    try:
        # A cancelled load stops before its next step.
        async with asyncio.timeout(SECONDS):
            return 200, "image/jpeg", await thumbnail(path, int(width))
    except TimeoutError:
        return 504, "text/plain", b"this takes too long"
    except sm.MediaError:
        return 415, "text/plain", b"not an image or a video"


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer one request."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status, kind, content = await answer(head.split()[1])
        lines = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
            f"Content-Type: {kind}",
            f"Content-Length: {len(content)}",
            "Connection: close\r\n\r\n",
        )
        writer.write("\r\n".join(lines).encode() + content)
        await writer.drain()
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError, IndexError):
        pass  # the client disconnected, or did not send HTTP
    finally:
        writer.close()


async def get(port: int, target: str) -> tuple[int, str, bytes]:
    """Send a request to the server."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    head, _, content = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    status, kind = head.decode().splitlines()[:2]
    return int(status.split()[1]), kind.partition(": ")[2], content


async def demonstrate(port: int) -> None:
    """Request some thumbnails, and print the answers."""
    for target in (
        "/technician_turned.jpg?width=128",
        "/nasa_13013.mp4?width=96",
        "/missing.jpg",
        "/README.md",
        "/technician.jpg?width=99999999",
    ):
        status, kind, content = await get(port, target)
        what = content.decode() if kind == "text/plain" else kind
        if kind == "image/jpeg":
            image = sm.load_image(content)
            what += f", {image.shape[1]}x{image.shape[0]}"
        print(f"{target:33}  {status}  {what}")

    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    other = asyncio.create_task(count())
    answers = await asyncio.gather(*(get(port, "/nasa_13013.mp4") for _ in range(8)))
    other.cancel()
    statuses = {status for status, _, _ in answers}
    print(
        f"8 thumbnails at the same time: {len(answers)} answers of {', '.join(map(str, statuses))}"
    )
    print(f"other tasks ran meanwhile: {turns > 8}")


async def main(port: int | None) -> None:
    """Run the program; see the module."""
    server = await asyncio.start_server(serve, "127.0.0.1", port or 0)
    async with server:
        if port is None:
            await demonstrate(server.sockets[0].getsockname()[1])
        else:
            print(f"http://127.0.0.1:{port}/technician_turned.jpg?width=128", flush=True)
            await server.serve_forever()


if __name__ == "__main__":
    try:
        asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else None))
    except KeyboardInterrupt:
        print("stopped")
