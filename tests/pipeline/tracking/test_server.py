"""A server is asked before any work: what answers, what doesn't, and what answers and isn't one."""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from offstage.pipeline.errors import StorageError
from offstage.pipeline.tracking import server
from offstage.pipeline.tracking.server import credentials, require_server

NO_SUCH = json.dumps({"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "none"})


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


@pytest.mark.parametrize(("code", "content"), [(404, NO_SUCH), (200, '{"experiment": {"name": "mine"}}'), (401, "no")])
def test_a_server_that_knows_what_an_experiment_is_or_wants_a_password_is_one(code: int, content: str) -> None:
    with answering(code, content) as (uri, asked):
        require_server(uri, "a b/c")
    assert asked[0].path.endswith("experiments/get-by-name?experiment_name=a%20b%2Fc")


@pytest.mark.parametrize(
    ("code", "content", "words"),
    [
        (200, "<html>", "tracker.uri: 'http://127.0.0.1:{port}' answers (200), and is no MLflow server"),
        (404, "[1]", "answers (404), and is no MLflow server"),
        (502, "", "answers (502), and is no MLflow server"),
        (200, '{"experiment": {"lifecycle_stage": "deleted"}}', "tracker.experiment: 'mine' was deleted"),
    ],
)
def test_what_answers_and_can_take_no_run_is_told_apart(code: int, content: str, words: str) -> None:
    with answering(code, content) as (uri, _), pytest.raises(StorageError) as error:
        require_server(uri, "mine")
    assert words.format(port=uri.rpartition(":")[2]) in str(error.value)


def test_credentials_that_are_refused_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "mine")
    with answering(403, "") as (uri, asked), pytest.raises(StorageError, match="refuses the credentials"):
        require_server(uri, "mine")
    assert asked[0].headers["Authorization"] == "Bearer mine"


def test_a_name_with_a_password_comes_before_a_token() -> None:
    known = {"MLFLOW_TRACKING_USERNAME": "me", "MLFLOW_TRACKING_PASSWORD": "pass", "MLFLOW_TRACKING_TOKEN": "t"}
    assert credentials(known) == {"Authorization": "Basic " + base64.b64encode(b"me:pass").decode()}
    assert credentials({"MLFLOW_TRACKING_USERNAME": "me"}) == {}


def test_where_nothing_listens_one_line_names_the_key_and_the_address() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(StorageError) as error:
            require_server(uri, "mine")
    assert f"tracker.uri: '{uri}' can't be reached within 5 s (ConnectionRefusedError" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_server_that_takes_the_question_and_never_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "WAIT_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(StorageError, match="timed out"):
        require_server(f"http://127.0.0.1:{silent.getsockname()[1]}", "mine")
