"""A Hub of one repository on this machine: as much of its protocol as a download needs, and what was asked of it."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

REPOSITORY, COMMIT = "org/name", "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """Serves the files of ``folder`` as ``org/name``; ``asked`` holds every path that was requested."""

    def __init__(self, folder: Path) -> None:
        self.files = {file.name: file for file in sorted(folder.iterdir()) if file.is_file()}
        self.asked: list[str] = []
        self.endpoint = ""

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
            described = hub.describe(path)
            file = hub.files.get(path.rpartition("/")[2]) if path.startswith(f"/{REPOSITORY}/resolve/") else None
            found = described is not None or file is not None
            body = json.dumps(described or {"error": "not found"}).encode() if file is None else file.read_bytes()
            self.send_response(200 if found else 404)
            if not found:
                self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{tag(file) if file else COMMIT}"')
            self.end_headers()
            if sends:
                self.wfile.write(body)

    return Handler
