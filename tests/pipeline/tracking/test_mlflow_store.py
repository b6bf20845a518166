"""A server is asked before any work, by MLflow's client: what answers, what doesn't, what answers and isn't one."""

from __future__ import annotations

import base64
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from offstage.pipeline.errors import StorageError
from offstage.pipeline.tracking.mlflow_store import HURRY, require_server
from offstage.pipeline.tracking.options import TrackerConfig
from offstage.pipeline.tracking.trackers import require_tracker

pytest.importorskip("mlflow", reason="the extra mlflow isn't installed")

NO_SUCH = json.dumps({"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "none"})


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in HURRY.items():
        monkeypatch.setenv(name, value)


@contextmanager
def answering(code: int, content: str) -> Iterator[tuple[str, list[BaseHTTPRequestHandler]]]:
    """Yield the address of a server that always says the same, and what it was asked."""
    asked: list[BaseHTTPRequestHandler] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self)
            self.send_response(code)
            self.end_headers()
            self.wfile.write(content.encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{running.server_port}", asked
        finally:
            running.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("code", "content"), [(404, NO_SUCH), (200, '{"experiment": {"name": "a b/c", "lifecycle_stage": "active"}}')]
)
def test_a_server_that_knows_what_an_experiment_is_is_one(code: int, content: str) -> None:
    with answering(code, content) as (uri, asked):
        require_server(uri, "a b/c")
    assert asked[0].path.split("?")[0].endswith("experiments/get-by-name")


@pytest.mark.parametrize(
    ("code", "content", "words"),
    [
        (200, "<html>", "what answers is no MLflow server"),
        (200, '{"experiment": {}}', "what answers is no MLflow server"),
        (404, "[1]", "what answers is no MLflow server, or one at fault (MlflowException: API request"),
        (502, "", "too many 502 error responses"),
        (401, "no", "it refuses the credentials that MLflow finds for it"),
        (200, '{"experiment": {"name": "mine", "lifecycle_stage": "deleted"}}', "its experiment 'mine' was deleted"),
    ],
)
def test_what_answers_and_can_take_no_run_is_told_apart(code: int, content: str, words: str) -> None:
    with answering(code, content) as (uri, _), pytest.raises(StorageError) as error:
        require_server(uri, "mine")
    assert words in str(error.value)


@pytest.mark.parametrize("source", ["variables", "token", "file"])
def test_credentials_of_every_source_of_mlflow_s_are_sent_and_never_told(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.joinpath(".mlflow").mkdir(parents=True)
    variables = {
        "variables": {"MLFLOW_TRACKING_USERNAME": "me", "MLFLOW_TRACKING_PASSWORD": "hidden"},
        "token": {"MLFLOW_TRACKING_TOKEN": "hidden"},
        "file": {"HOME": str(home)},
    }[source]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    home.joinpath(".mlflow/credentials").write_text(
        "[mlflow]\nmlflow_tracking_username=me\nmlflow_tracking_password=hidden"
    )
    with answering(403, "you sent hidden") as (uri, asked), pytest.raises(StorageError) as error:
        require_tracker(TrackerConfig("mlflow", uri=uri))
    basic = "Basic " + base64.b64encode(b"me:hidden").decode()
    assert asked[0].headers["Authorization"] == ("Bearer hidden" if source == "token" else basic)
    assert f"tracker.uri: '{uri}' takes no run: it refuses the credentials" in str(error.value)
    assert "hidden" not in str(error.value)


def test_where_nothing_listens_one_line_names_the_key_and_the_address() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(StorageError) as error:
            require_tracker(TrackerConfig("mlflow", uri=uri))
    assert f"tracker.uri: '{uri}' takes no run: it can't be reached within 5 s (ConnectionRefusedError" in str(
        error.value
    )
    assert "\n" not in str(error.value)


def test_a_server_that_takes_the_question_and_never_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(StorageError, match="timed out"):
        require_server(f"http://127.0.0.1:{silent.getsockname()[1]}", "mine")


def test_the_library_is_no_part_of_the_process_that_asks() -> None:
    code = (
        "import sys\nfrom offstage.pipeline.errors import StorageError\n"
        "from offstage.pipeline.tracking.options import TrackerConfig\n"
        "from offstage.pipeline.tracking.trackers import require_tracker\n"
        "try:\n    require_tracker(TrackerConfig('mlflow', uri='http://127.0.0.1:9'))\n"
        "except StorageError:\n    sys.exit('mlflow' in sys.modules)\nsys.exit(2)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, check=False).returncode == 0
