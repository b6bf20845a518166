"""``loaded.submit``: calls of many threads, one after another or in lockstep, each with the bits that it has alone."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

import offstage
from tests.long_form import in_ci
from tests.python_api.rates import RATES

TINY = Path(__file__).parents[2] / "conf" / "checkpoints" / "tiny"
CLIENTS = 32
Open = Callable[..., offstage.LoadedModel]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def opened(cache: Path) -> Iterator[Open]:
    models: list[offstage.LoadedModel] = []

    def load(**options: Any) -> offstage.LoadedModel:
        streams: dict[str, Any] = {
            "max_memory": {"cpu": "3MB"},
            "hardware": {"rates": RATES},
            "storage": {"io": "direct"},
        }
        models.append(offstage.load(TINY, cache=cache, max_length=64, **streams, **options))
        assert models[-1].plan.serving, "weights stream"
        return models[-1]

    yield load
    for model in models:
        model.close()


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """What the plain model answers to each client."""
    plain: Any = AutoModelForCausalLM.from_pretrained(TINY).eval()
    return [plain.generate(ids_of(client), **options_of(client))[0].tolist() for client in range(CLIENTS)]


def ids_of(client: int) -> torch.Tensor:
    return torch.tensor([[5 + client, *range(7, 9 + client % 5)]])


def options_of(client: int) -> dict[str, Any]:
    return {"max_new_tokens": 2 + client % 4, "do_sample": False}


def ask(loaded: offstage.LoadedModel, client: int) -> Future[Any]:
    model: Any = loaded.model
    return loaded.submit(model.generate, ids_of(client), **options_of(client))


class Gate(BaseStreamer):  # type: ignore[misc]
    """Says when the first token is there; the call goes on once the gate is opened."""

    def __init__(self) -> None:
        self.reached, self.opened, self.tokens = threading.Event(), threading.Event(), 0

    def put(self, value: object) -> None:
        self.tokens += 1
        if self.tokens == 2:  # the first is the prompt
            self.reached.set()
            assert self.opened.wait(30)

    def end(self) -> None:
        """Nothing is kept."""


def long_call(loaded: offstage.LoadedModel, gate: Gate) -> Any:
    model: Any = loaded.model
    call = loaded.submit(model.generate, ids_of(0), max_new_tokens=40, do_sample=False, streamer=gate)
    assert gate.reached.wait(30)
    return call


@pytest.mark.parametrize(
    ("concurrency", "size"), in_ci(("lockstep", 4), of=[("queue", 1), ("lockstep", 4), ("lockstep", 9)])
)
def test_many_clients_have_the_answers_that_each_has_alone(
    concurrency: str, size: int, opened: Open, alone: list[list[int]]
) -> None:
    loaded = opened(concurrency=concurrency, batch_size=size)
    with ThreadPoolExecutor(CLIENTS) as clients:
        answers = list(clients.map(lambda client: ask(loaded, client).result(60)[0].tolist(), range(CLIENTS)))
    assert answers == alone


@pytest.mark.long_form
def test_calls_in_lockstep_share_what_streams(opened: Open) -> None:
    def streamed(**options: Any) -> int:
        loaded = opened(**options)
        gate = Gate()
        first = long_call(loaded, gate)
        before = loaded.traffic.storage_bytes
        calls = [ask(loaded, 3) for _ in range(3)]
        gate.opened.set()
        for call in (first, *calls):
            call.result(60)
        return int(loaded.traffic.storage_bytes - before)

    assert streamed(concurrency="lockstep", batch_size=4) < 0.85 * streamed(concurrency="queue")


def test_clients_of_asyncio_await_it(opened: Open, alone: list[list[int]]) -> None:
    loaded = opened(concurrency="lockstep", batch_size=8)

    async def client(number: int) -> list[int]:
        answer = await asyncio.wrap_future(ask(loaded, number))
        return list(answer[0].tolist())

    async def clients() -> list[list[int]]:
        return await asyncio.gather(*(client(number) for number in range(CLIENTS)))

    assert asyncio.run(clients()) == alone


@pytest.mark.parametrize("concurrency", ["queue", "lockstep"])
def test_a_client_that_goes_away_frees_its_place_before_its_next_token(
    concurrency: str, opened: Open, alone: list[list[int]]
) -> None:
    loaded = opened(concurrency=concurrency, batch_size=2)
    gate = Gate()
    leaving, waiting, gone = long_call(loaded, gate), ask(loaded, 1), ask(loaded, 2)
    assert gone.cancel()
    assert leaving.cancel()
    gate.opened.set()
    assert waiting.result(60)[0].tolist() == alone[1]
    with pytest.raises(CancelledError):
        leaving.result(60)
    assert gone.cancelled()
    assert gate.tokens == 2
    assert not waiting.cancel(), "it is over"
    assert ask(loaded, 3).result(60)[0].tolist() == alone[3]


def test_an_error_of_one_call_is_its_own(opened: Open, alone: list[list[int]]) -> None:
    loaded = opened(concurrency="lockstep", batch_size=3)

    class Refuses(Gate):
        def put(self, value: object) -> None:
            super().put(value)
            raise ValueError("the client's pipe is broken")

    gate = Refuses()
    gate.opened.set()
    model: Any = loaded.model
    broken = loaded.submit(model.generate, ids_of(0), max_new_tokens=5, streamer=gate)
    sound = [ask(loaded, client) for client in range(4)]
    with pytest.raises(ValueError, match="pipe is broken"):
        broken.result(60)
    assert [call.result(60)[0].tolist() for call in sound] == alone[:4]


@pytest.mark.parametrize("concurrency", in_ci("lockstep", of=["queue", "lockstep"]))
def test_clients_who_sample_one_prompt_have_answers_of_their_own_unless_they_seed(
    concurrency: str, opened: Open
) -> None:
    loaded = opened(concurrency=concurrency, batch_size=3)
    sampled: dict[str, Any] = {"max_new_tokens": 8, "do_sample": True, "top_k": 0}

    def seeded(model: Any) -> Any:
        torch.manual_seed(5)
        return model.generate(ids_of(0), **sampled)

    model: Any = loaded.model
    calls = [loaded.submit(model.generate, ids_of(0), **sampled) for _ in range(4)]
    answers = {tuple(call.result(60)[0].tolist()) for call in calls}
    calls = [loaded.submit(seeded, model) for _ in range(4)]
    repeated = {tuple(call.result(60)[0].tolist()) for call in calls}
    assert len(answers) == 4
    assert repeated == {tuple(seeded(AutoModelForCausalLM.from_pretrained(TINY).eval())[0].tolist())}


def test_more_than_may_wait_are_refused(opened: Open) -> None:
    loaded = opened(max_waiting=2)
    gate = Gate()
    calls = [long_call(loaded, gate), ask(loaded, 0), ask(loaded, 1)]
    with pytest.raises(offstage.BusyError, match="max_waiting: 2 calls of this model wait already; come again later"):
        ask(loaded, 2)
    gate.opened.set()
    for call in calls:
        call.result(60)
    ask(loaded, 2).result(60)


def test_closing_ends_what_is_under_way_and_what_waits(opened: Open) -> None:
    loaded = opened(concurrency="lockstep", batch_size=2)
    gate = Gate()
    calls = [long_call(loaded, gate), ask(loaded, 0), ask(loaded, 1)]
    closing = threading.Thread(target=loaded.close)
    closing.start()
    time.sleep(0.1)
    gate.opened.set()
    closing.join(60)
    assert not closing.is_alive()
    for call in calls:
        with pytest.raises(RuntimeError, match="this model was closed"):
            call.result(60)
    with pytest.raises(RuntimeError, match="this model was closed"):
        ask(loaded, 0)


@pytest.mark.long_form
def test_threads_that_call_the_model_themselves_have_their_turn_between(opened: Open, alone: list[list[int]]) -> None:
    loaded = opened(concurrency="lockstep", batch_size=2)
    ended = threading.Event()

    def clients() -> None:
        while not ended.is_set():
            ask(loaded, 3).result(60)

    busy = [threading.Thread(target=clients) for _ in range(4)]
    for thread in busy:
        thread.start()
    try:
        model: Any = loaded.model
        tokens = [model.generate(ids_of(client), **options_of(client))[0].tolist() for client in range(3)]
        answers = loaded.generate([ids_of(1)[0].tolist()], **options_of(1))
    finally:
        ended.set()
        for thread in busy:
            thread.join(60)
    assert tokens == alone[:3]
    assert [*ids_of(1)[0].tolist(), *answers[0].token_ids] == alone[1]


def test_a_call_that_hands_over_another_is_refused(opened: Open) -> None:
    loaded = opened()
    with pytest.raises(RuntimeError, match="can't hand over another, for which it would wait: make it"):
        loaded.submit(partial(ask, loaded, 0)).result(60)


def test_the_thread_ends_with_the_work_and_another_begins(
    opened: Open, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offstage.stages.dispatch.call_queue._IDLE_SECONDS", 0.05)
    loaded = opened()
    for client in (0, 1):
        assert ask(loaded, client).result(60)[0].tolist() == alone[client]
        until = time.monotonic() + 30
        while any(thread.name == "offstage-calls" for thread in threading.enumerate()):
            assert time.monotonic() < until
            time.sleep(0.02)


def test_a_forked_child_answers_too(opened: Open, alone: list[list[int]]) -> None:
    loaded = opened(concurrency="lockstep", batch_size=2)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # libgomp's teams don't survive a fork
    try:
        assert ask(loaded, 1).result(60)[0].tolist() == alone[1]
        child = os.fork()
        if not child:
            right = ask(loaded, 2).result(60)[0].tolist() == alone[2]
            os._exit(0 if right else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert ask(loaded, 3).result(60)[0].tolist() == alone[3]
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"concurrency": "threads"}, "concurrency: 'threads' is no way for calls to go; give 'queue' or 'lockstep'"),
        ({"max_waiting": 0}, "max_waiting: 0 is no count; give a whole number from 1"),
    ],
)
def test_options_that_say_nothing_are_refused(options: dict[str, Any], said: str, opened: Open) -> None:
    with pytest.raises(offstage.ConfigError, match=said):
        opened(**options)
