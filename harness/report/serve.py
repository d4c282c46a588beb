"""Serve the page of results on this machine alone, and make it anew while a campaign runs."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from harness.base import bounds

ADDRESS = "127.0.0.1"
HOSTS = (ADDRESS, "localhost")  # another name would be a stranger's page that points its own at this machine
# The campaign measures on the same CPUs, so that of one CPU the page takes a twentieth at most.
PAUSE = 20  # times what a look at the folders took


class Pages:
    """The page of some paths. `build`: makes it of a version, which names a state of the records."""

    def __init__(self, paths: Sequence[Path], build: Callable[[str], str]) -> None:
        self._paths, self._build = paths, build
        self._lock = threading.Lock()
        self._version, self._page = "", b""  # made when it is first asked for
        self._next = 0.0

    def newest(self) -> tuple[str, bytes]:
        """The version and the page, made anew if the records have changed since."""
        with self._lock:
            begun = time.monotonic()
            if begun >= self._next:
                try:
                    version = state(self._paths)
                    if version != self._version:
                        self._page, self._version = _bytes(self._build(version)), version
                finally:
                    ended = time.monotonic()
                    self._next = ended + PAUSE * (ended - begun)
            return self._version, self._page


def state(paths: Sequence[Path]) -> str:
    """A digest of the names, sizes and times of all records and files given; not of their content."""
    lines = sorted(line for path in paths for line in _lines(path))
    return sha256(_bytes("\n".join(lines))).hexdigest()[:16]


def _bytes(text: str) -> bytes:
    """UTF-8, names of files that are not are escaped."""
    return text.encode(errors="backslashreplace")


def _lines(path: Path) -> Iterator[str]:
    if path.is_dir():
        for folder, _, files in os.walk(path):
            if "record.json" in files:
                yield from _lines(Path(folder) / "record.json")
        return
    try:
        status = path.stat()
    except OSError:  # gone since
        return
    yield f"{path} {status.st_size} {status.st_mtime_ns}"


def server(pages: Pages, port: int) -> ThreadingHTTPServer:
    """A server of the one page at `/`; port 0: any free one. Raises OSError if the port is in use."""

    class Handler(BaseHTTPRequestHandler):
        timeout = bounds.SERVE_IDLE_S

        def do_GET(self) -> None:
            if self.headers.get("Host", "").partition(":")[0] not in HOSTS:
                return self.send_error(403, "only for this machine")
            if self.path != "/":
                return self.send_error(404)
            version, page = pages.newest()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(page)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("ETag", f'"{version}"')
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(page)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            """Nothing: an open page asks every two seconds."""

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            if not isinstance(sys.exc_info()[1], ConnectionError):  # a tab was closed
                super().handle_error(request, client_address)  # type: ignore[arg-type]

    return Server((ADDRESS, port), Handler)
