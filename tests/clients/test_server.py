"""The server of the page on serving, as it stands there: FastAPI under uvicorn; clients that stay, and that leave."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.clients.doors import TINY

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

ROOT = Path(__file__).parents[2]
CLIENTS = 32
PROMPTS = [f"{first} {second}" for first in ("The", "A list of", "It") for second in ("key", "value", "names")]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    folder, number = tmp_path_factory.mktemp("server"), free_port()
    (code,) = re.findall(r"^```python\n(.*?)^```", (ROOT / ".github/SERVING.md").read_text(), re.MULTILINE | re.DOTALL)
    folder.joinpath("serve.py").write_text(code)
    environment = {
        **os.environ,
        "CHECKPOINT": str(TINY),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    with folder.joinpath("said").open("w") as said:
        server = subprocess.Popen(
            [sys.executable, "-m", "uvicorn", "serve:app", "--port", str(number), "--log-level", "warning"],
            cwd=folder, env=environment, stdout=said, stderr=said,
        )  # fmt: skip
        try:
            until = time.monotonic() + 120
            while not answers(number):
                assert server.poll() is None, folder.joinpath("said").read_text()
                assert time.monotonic() < until
                time.sleep(0.1)
            yield number
        finally:
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) in (0, -signal.SIGTERM)
    assert "Traceback" not in folder.joinpath("said").read_text()


def answers(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/docs", timeout=5).close()
    except (urllib.error.URLError, ConnectionError):
        return False
    return True


def ask(port: int, prompt: str, count: int = 12) -> str:
    body = json.dumps({"prompt": prompt, "max_new_tokens": count}).encode()
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/generate", body, {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(asked, timeout=60) as answer:
        return str(answer.read().decode())


def wanted(prompt: str, count: int = 12) -> str:
    model: Any = AutoModelForCausalLM.from_pretrained(TINY).eval()
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    inputs = tokenizer(prompt, return_tensors="pt")
    with torch.no_grad():
        tokens = model.generate(**inputs, max_new_tokens=count, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


def test_clients_at_once_have_the_words_of_the_plain_model(port: int) -> None:
    asked = [PROMPTS[number % len(PROMPTS)] for number in range(CLIENTS)]
    with ThreadPoolExecutor(CLIENTS) as clients:
        answers = list(clients.map(lambda prompt: ask(port, prompt), asked))
    expected = {prompt: wanted(prompt) for prompt in PROMPTS}
    assert answers == [expected[prompt] for prompt in asked]


def test_clients_that_leave_in_the_midst_leave_room_for_the_others(port: int) -> None:
    body = json.dumps({"prompt": "The", "max_new_tokens": 900}).encode()
    for _ in range(20):
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
        assert connection.getresponse().read(1)
        connection.close()
    began = time.monotonic()
    assert ask(port, "It key") == wanted("It key")
    assert time.monotonic() - began < 30, "900 tokens of each of 20 take minutes"
