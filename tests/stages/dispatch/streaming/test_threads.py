"""Threads that call one model by themselves: they take turns, and each has the answers that it has alone."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offstage
from offstage.stages.checkpoints.direct_file import DirectFile
from offstage.stages.dispatch.streaming.streamer import streamer_of
from tests.deadline import deadline
from tests.long_form import in_ci
from tests.stages.dispatch.streaming.lockstep_grid import CONFIGS, ON_DISK, Call, Setting, calls, opened, saved

THREADS = 6
LENGTHS = ((3, 5), (9, 2), (1, 4), (6, 6), (2, 1), (4, 3))
DIRECT, MAPPED, ON_HOST = ON_DISK, {"device_map": "disk", "storage": {"io": "mmap"}}, {"max_memory": {"cpu": "2GB"}}
SIMULATED = {
    "device_map": "balanced",
    "max_memory": {0: "60kB", "cpu": "1GB"},
    "hardware": {"devices": [{"name": "a", "memory": "100MB"}]},
}


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    """Fail, and don't hang, where a turn never comes."""
    with deadline():
        yield


def asked(name: str) -> Setting:
    return Setting(name, torch.float32, lengths=LENGTHS)


def in_threads(tasks: Sequence[Call]) -> list[torch.Tensor]:
    """Call ``tasks`` at once, each in a thread of its own."""
    gate, answers = threading.Barrier(len(tasks)), {}

    def answer(number: int, task: Call) -> None:
        gate.wait()
        answers[number] = task()

    threads = [threading.Thread(target=answer, args=pair) for pair in enumerate(tasks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [answers[number] for number in range(len(tasks))]


def in_a_pool(tasks: Sequence[Call]) -> list[torch.Tensor]:
    """Call ``tasks`` in fewer threads than there are tasks."""
    with ThreadPoolExecutor(3) as pool:
        return [*pool.map(lambda task: task(), tasks)]


def in_a_loop(tasks: Sequence[Call]) -> list[torch.Tensor]:
    """Call ``tasks`` as the handlers of a server do."""

    async def together() -> list[torch.Tensor]:
        return await asyncio.gather(*(asyncio.to_thread(task) for task in tasks))

    return asyncio.run(together())


@contextmanager
def through(door: str, folder: Path) -> Iterator[nn.Module]:
    """Open the checkpoint that was ``saved`` in ``folder`` by a call of the package, its weights not in memory."""
    if door in OPTIONS:
        with opened(folder, **OPTIONS[door]) as loaded:
            yield loaded.model
        return
    auto: Any = __import__("transformers").AutoModelForCausalLM
    if door == "load_checkpoint_and_dispatch":
        with offstage.init_empty_weights():
            empty = auto.from_config(auto.from_pretrained(folder / "checkpoint").config)
        device_map = {"model": "disk", "lm_head": "cpu"}
        yield offstage.load_checkpoint_and_dispatch(
            empty, folder / "checkpoint", device_map=device_map, offload_folder=folder / "offload"
        )
        return
    model = auto.from_pretrained(folder / "checkpoint")
    if door == "disk_offload":
        offstage.disk_offload(model, folder / "offload", execution_device=torch.device("cpu"))
    else:
        device_map = {"model": "disk", "lm_head": "cpu"}
        offstage.dispatch_model(model, device_map, main_device="cpu", offload_dir=folder / "offload")
    yield model


OPTIONS: dict[str, Any] = {
    "direct reads": DIRECT, "mapped": MAPPED, "on the host": ON_HOST, "an accelerator": SIMULATED,
}  # fmt: skip
DOORS = (*OPTIONS, "load_checkpoint_and_dispatch", "disk_offload", "dispatch_model")


@pytest.mark.parametrize(
    ("at_once", "door"),
    in_ci(
        *((in_threads, door) for door in DOORS),
        (in_a_pool, "direct reads"),
        (in_a_loop, "direct reads"),
        of=itertools.product([in_threads, in_a_pool, in_a_loop], DOORS),
    ),
)
def test_each_thread_has_the_answers_that_it_has_alone(
    at_once: Callable[[Sequence[Call]], list[torch.Tensor]], door: str, tmp_path: Path
) -> None:
    plain = saved(tmp_path / "checkpoint", "llama", torch.float32)
    wanted = [call() for call in calls(plain, asked("llama").asked())]
    with through(door, tmp_path) as model:
        for _ in range(3):
            answers = at_once(calls(model, asked("llama").asked()))
            assert all(map(torch.equal, answers, wanted))


@pytest.mark.parametrize("name", in_ci("qwen3_moe", "recurrent_gemma", of=CONFIGS))
def test_threads_of_every_kind_of_model_take_turns(name: str, tmp_path: Path) -> None:
    plain = saved(tmp_path / "checkpoint", name, torch.float32)
    # with a prompt of one token RecurrentGemma goes on from the state that the last call has left, whichever it was
    prompts = [one for one in asked(name).asked() if name != "recurrent_gemma" or one[0].shape[1] > 1]
    wanted = [call() for call in calls(plain, prompts)]
    with opened(tmp_path) as loaded:
        for _ in range(3 if name == "recurrent_gemma" else 1):
            assert all(map(torch.equal, in_threads(calls(loaded.model, prompts)), wanted))


def test_forwards_parts_and_lockstep_take_turns_with_what_generates(tmp_path: Path) -> None:
    plain = saved(tmp_path / "checkpoint", "llama", torch.float32)
    ids, states = torch.tensor([[5, 6, 7]]), torch.randn(1, 3, 32)

    def tasks(model: Any) -> list[Call]:
        def together() -> torch.Tensor:
            if model is plain:
                return model.generate(ids, max_new_tokens=3, do_sample=False)
            return offstage.lockstep(model, calls(model, [(ids, 3)] * 2))[1]

        with_gradients = lambda: torch.autograd.grad(model(inputs_embeds=given).logits.sum(), given)[0]  # noqa: E731
        given = states.clone().requires_grad_()
        return [
            partial(model.generate, ids, max_new_tokens=4, do_sample=False),
            lambda: model(ids).logits,
            lambda: model.model.layers[1].mlp(states),
            with_gradients,
            together,
            together,
        ]

    wanted = [task() for task in tasks(plain)]
    with opened(tmp_path) as loaded:
        for _ in range(5):
            assert all(map(torch.equal, in_threads(tasks(loaded.model)), wanted))


@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
def test_what_one_thread_raises_is_its_own_and_leaves_the_model_free(
    error: type[BaseException], tmp_path: Path
) -> None:
    plain = saved(tmp_path / "checkpoint", "llama", torch.float32)
    wanted = [call() for call in calls(plain, asked("llama").asked())]
    with opened(tmp_path) as loaded:
        model: Any = loaded.model

        def throw(_module: Any, _args: Any) -> None:
            if threading.current_thread().name.startswith("failing"):
                raise error("enough")

        with model.model.layers[1].mlp.register_forward_pre_hook(throw), ThreadPoolExecutor(1, "failing") as failing:
            failed = [failing.submit(call) for call in calls(model, asked("llama").asked())]
            answers = in_threads(calls(model, asked("llama").asked()))
        assert all(isinstance(each.exception(), error) for each in failed)
        assert all(map(torch.equal, answers, wanted))


@pytest.mark.filterwarnings("error:module forward hook")  # torch's word for one that raised as it took back
def test_a_call_that_fails_before_its_turn_takes_nothing_from_the_one_under_way(tmp_path: Path) -> None:
    plain = saved(tmp_path / "checkpoint", "llama", torch.float32)
    states, wanted = torch.randn(1, 3, 32), plain(torch.tensor([[5, 6, 7]])).logits
    with opened(tmp_path) as loaded:
        model: Any = loaded.model
        under_way, go_on = threading.Event(), threading.Event()
        part = model.model.layers[1].mlp.gate_proj

        def stop(_module: Any, _args: Any) -> None:
            under_way.set()
            go_on.wait()

        def throw(_module: Any, _args: Any) -> None:
            if threading.current_thread().name.startswith("failing"):
                raise ArithmeticError("before all other hooks")

        part.register_forward_pre_hook(stop)
        part.register_forward_pre_hook(throw, prepend=True)
        with ThreadPoolExecutor(1) as pool, ThreadPoolExecutor(1, "failing") as failing:
            busy = pool.submit(model, torch.tensor([[5, 6, 7]]))
            under_way.wait()
            failed = failing.submit(part, states).exception()
            go_on.set()
            assert isinstance(failed, ArithmeticError)
            assert torch.equal(busy.result().logits, wanted)
        assert torch.equal(model(torch.tensor([[5, 6, 7]])).logits, wanted)


def test_closing_waits_for_the_pass_of_another_thread_and_every_use_after_it_says_so(tmp_path: Path) -> None:
    saved(tmp_path / "checkpoint", "llama", torch.float32)
    with opened(tmp_path) as loaded:
        model: Any = loaded.model
        under_way, go_on = threading.Event(), threading.Event()

        def stop(_module: Any, _args: Any) -> None:
            under_way.set()
            go_on.wait()

        stopping = model.model.layers[1].register_forward_pre_hook(stop)
        with ThreadPoolExecutor(3) as pool:
            generating: Future[Any] = pool.submit(model.generate, torch.tensor([[5]]), max_new_tokens=5000)
            under_way.wait()
            waiting = pool.submit(model, torch.tensor([[5]]))
            closing = pool.submit(loaded.close)
            assert not closing.done()
            stopping.remove()
            go_on.set()
            closing.result()
            with pytest.raises(RuntimeError, match="this model was closed"):
                generating.result()
            error = waiting.exception()
            assert error is None or "this model was closed" in str(error), "as its turn came before the end or after it"
    uses: list[Callable[[], Any]] = [
        lambda: model(torch.tensor([[5]])), lambda: model.generate(torch.tensor([[5]])),
        lambda: model.model.layers[0].mlp(torch.ones(1, 32)), model.half, model.state_dict,
        lambda: model.save_pretrained(tmp_path / "other"),
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(RuntimeError, match="this model was closed"):
            use()


def test_a_call_that_begins_while_the_model_is_closed_says_so(tmp_path: Path) -> None:
    saved(tmp_path / "checkpoint", "llama", torch.float32)
    for _ in range(6):
        with opened(tmp_path) as loaded, ThreadPoolExecutor(1) as pool:
            model: Any = loaded.model
            under_way = threading.Event()
            model.model.layers[1].register_forward_hook(lambda *_, under_way=under_way: under_way.set())
            generating = pool.submit(model.generate, torch.tensor([[5]]), max_new_tokens=5000)
            under_way.wait()
            loaded.close()
            with pytest.raises(RuntimeError, match="this model was closed"):
                generating.result()


@pytest.mark.parametrize("storage", [DIRECT, MAPPED, ON_HOST], ids=["direct", "mapped", "host"])
def test_a_model_goes_on_in_a_process_that_was_forked_while_another_thread_called_it(
    storage: dict[str, Any], tmp_path: Path
) -> None:
    plain = saved(tmp_path / "checkpoint", "llama", torch.float32)
    ids = torch.tensor([[5, 6, 7]])
    (wanted,) = [call() for call in calls(plain, [(ids, 4)])]
    with opened(tmp_path, **storage) as loaded:
        model: Any = loaded.model
        under_way, go_on = threading.Event(), threading.Event()
        parent = os.getpid()

        def stop(_module: Any, _args: Any) -> None:
            if os.getpid() == parent:
                under_way.set()
                go_on.wait()

        model.model.layers[1].register_forward_pre_hook(stop)
        with ThreadPoolExecutor(1) as pool:
            busy = pool.submit(calls(model, [(ids, 4)])[0])
            under_way.wait()
            status = _status_of_child(lambda: _answers_in_child(loaded, ids, wanted))
            go_on.set()
            assert status == 0
            assert torch.equal(busy.result(), wanted)


def test_reads_that_are_under_way_as_a_process_is_forked_are_made_anew_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = saved(tmp_path / "checkpoint", "llama", torch.float32)
    ids = torch.tensor([[5, 6, 7]])
    (wanted,) = [call() for call in calls(plain, [(ids, 4)])]
    reading, go_on, parent, check = threading.Semaphore(0), threading.Event(), os.getpid(), DirectFile.check

    def check_slowly(file: DirectFile) -> None:
        if os.getpid() == parent:
            reading.release()
            go_on.wait()
        check(file)

    with opened(tmp_path) as loaded, ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(DirectFile, "check", check_slowly)
        busy = pool.submit(calls(loaded.model, [(ids, 4)])[0])
        for _ in range(3):
            reading.acquire()
        status = _status_of_child(lambda: _answers_in_child(loaded, ids, wanted))
        go_on.set()
        assert status == 0
        assert torch.equal(busy.result(), wanted)


def test_what_a_forked_process_lacks_is_refused_there(tmp_path: Path) -> None:
    saved(tmp_path / "checkpoint", "qwen3_moe", torch.float32)
    with opened(tmp_path) as loaded:

        def refused() -> bool:
            try:
                loaded.model(torch.tensor([[5]]))
            except RuntimeError as error:
                return "loaded before the process was forked" in str(error)
            return False

        assert _status_of_child(refused) == 0


def _answers_in_child(loaded: offstage.LoadedModel, ids: torch.Tensor, wanted: torch.Tensor) -> bool:
    same = torch.equal(calls(loaded.model, [(ids, 4)])[0](), wanted)
    loaded.close()
    return same


def _status_of_child(check: Callable[[], bool]) -> int:
    """Return 0 where ``check`` holds in a process that is forked from this one."""
    gc.collect()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            torch.set_num_threads(1)
            with deadline(30):
                status = 0 if check() else 2
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def test_the_model_of_a_streamer_is_known_in_every_thread(tmp_path: Path) -> None:
    saved(tmp_path / "checkpoint", "llama", torch.float32)
    with opened(tmp_path) as loaded, ThreadPoolExecutor(1) as pool:
        assert pool.submit(streamer_of, loaded.model).result() is streamer_of(loaded.model)
