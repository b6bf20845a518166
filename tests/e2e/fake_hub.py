"""A Hub of one repository on this machine: as much of its protocol as a download needs, and what was asked of it."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

STORE = "/elsewhere/"
REPOSITORY, COMMIT = "org/name", "0123456789abcdef0123456789abcdef01234567"


Lie = Callable[[int, int, bytes, dict[str, str]], tuple[int, bytes]]
"""Changes how a range is answered: of its two ends, the bytes there and the headers makes the status and the bytes."""


class FakeHub:
    """Serves the files of ``folder`` as ``org/name``; ``asked`` holds every path that was requested.

    ``sent`` counts the bytes of each file that were sent. A ``lie`` is told of ranges; where it ``redirects``, files
    are said to lie elsewhere, as the Hub's large ones do.
    """

    def __init__(self, folder: Path) -> None:
        self.asked: list[str] = []
        self.sent: Counter[str] = Counter()
        self.endpoint = ""
        self.offer(folder)

    def offer(self, folder: Path) -> None:
        """Serve the files of ``folder`` from now on, honestly."""
        self.files = {file.name: file for file in sorted(folder.iterdir()) if file.is_file()}
        self.lie: Lie | None = None
        self.redirects = False

    @property
    def downloaded(self) -> set[str]:
        """The names of the files that were sent."""
        return {line.removeprefix("GET ").rpartition("/")[2] for line in self.asked if line.startswith("GET /org")}

    def describe(self, path: str) -> object:
        """Return what the API says at ``path``; null where there is nothing."""
        if path.startswith(f"/api/models/{REPOSITORY}/tree/"):
            return [
                {"type": "file", "path": name, "size": file.stat().st_size, "oid": tag(file)}
                for name, file in self.files.items()
            ]
        if path in (f"/api/models/{REPOSITORY}", f"/api/models/{REPOSITORY}/revision/main"):
            return {"id": REPOSITORY, "sha": COMMIT, "siblings": [{"rfilename": name} for name in self.files]}
        return None


def without_ranges(_begin: int, _last: int, _data: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
    """Answer with all of a large file, as a server does that knows no ranges."""
    del headers["Content-Range"]
    return 200, bytes(10**7)


def tag(file: Path) -> str:
    """Return the name that the cache gives the content of ``file``."""
    return hashlib.sha1(file.read_bytes(), usedforsecurity=False).hexdigest()


@contextmanager
def serving(folder: Path) -> Iterator[FakeHub]:
    """Lend a Hub that serves ``folder`` for as long as the context lasts."""
    hub = FakeHub(folder)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(sends=False)

        def do_GET(self) -> None:
            self._answer(sends=True)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

        def _answer(self, *, sends: bool) -> None:
            path = urlsplit(self.path).path
            hub.asked.append(f"{self.command} {path}")
            described, name = hub.describe(path), path.rpartition("/")[2]
            in_repository = path.startswith((f"/{REPOSITORY}/resolve/", STORE))
            file = hub.files.get(name) if in_repository else None
            exists = described is not None or file is not None
            body = json.dumps(described or {"error": "not found"}).encode() if file is None else file.read_bytes()
            status, more = 200 if exists else 404, {}
            if not exists:
                more["X-Error-Code"] = "EntryNotFound" if in_repository else "RepoNotFound"
            elif file and hub.redirects and not path.startswith(STORE):
                more["Location"], more["X-Linked-Size"] = f"{hub.endpoint}{STORE}{name}", str(len(body))
                status, body = 302, b""
            elif file and "Range" in self.headers:
                begin, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
                status, more["Content-Range"] = 206, f"bytes {begin}-{last}/{len(body)}"
                body = body[begin : last + 1]
                if hub.lie:
                    status, body = hub.lie(begin, last, body, more)
            self.send_response(status)
            for key, value in more.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{tag(file) if file else COMMIT}"')
            self.end_headers()
            if sends:
                hub.sent[name] += len(body) if file else 0
                with suppress(OSError):  # who was sent too much has gone
                    self.wfile.write(body)

    return Handler
