"""An S3 that fails on demand, spoken to over real connections."""

from __future__ import annotations

import hashlib
import random
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

Mode = Literal["well", "503", "silent", "stalls", "moody"]


class FaultyS3:
    """Stores objects by path, and answers by mode: ``silent`` never, ``stalls`` stops in the middle of an object's bytes.

    ``moody`` picks a mode for each request.

    Attributes:
        mode: See above.
        objects: The stored objects.
        requests: The methods received so far.
        endpoint: The address while it serves.
    """

    def __init__(self) -> None:
        self.mode: Mode = "well"
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.endpoint = ""
        self.over = threading.Event()
        self.chance = random.Random(3)

    def mood(self) -> Mode:
        """Return the mode for the next request."""
        moods: tuple[Mode, ...] = ("well", "503", "silent", "stalls")
        return self.chance.choices(moods, (90, 6, 2, 2))[0] if self.mode == "moody" else self.mode

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Serve while the block runs."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"s3": self}))
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            self.endpoint = f"http://127.0.0.1:{server.server_port}"
            yield
        finally:
            self.over.set()
            server.shutdown()
            server.server_close()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    s3: FaultyS3
    mood: Mode

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        if self._fails():
            return
        self.s3.objects[self.path] = data
        self._say(200, ETag=_etag(data))

    def do_DELETE(self) -> None:
        if self._fails():
            return
        self.s3.objects.pop(self.path, None)
        self._say(204)

    def _answer(self, body: bool) -> None:
        if self._fails():
            return
        data = self.s3.objects.get(self.path)
        if data is None:
            self._say(404)
            return
        headers = {"ETag": _etag(data), "Last-Modified": "Sun, 22 Nov 2026 00:00:00 GMT"}
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        part = data[int(found[1]) : int(found[2]) + 1] if found else data
        if found:
            headers["Content-Range"] = f"bytes {found[1]}-{int(found[1]) + len(part) - 1}/{len(data)}"
        if self.mood == "stalls" and body:
            self._say(206 if found else 200, part[: len(part) // 2], length=len(part), **headers)
            self.s3.over.wait()
            self.close_connection = True
            return
        self._say(206 if found else 200, part if body else b"", length=len(part), **headers)

    def _fails(self) -> bool:
        self.s3.requests.append(self.command)
        self.mood = self.s3.mood()
        if self.mood == "silent":
            self.s3.over.wait()
            self.close_connection = True
            return True
        if self.mood == "503":
            self._say(503)
            return True
        return False

    def _say(self, status: int, body: bytes = b"", length: int | None = None, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'
