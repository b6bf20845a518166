"""Many prompts in lockstep over several hosts: each has what it has alone, whatever hosts come to at what time."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from functools import cache
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import nn

from offstage.stages.dispatch.streaming.lanes import Grouping, Lanes
from offstage.stages.dispatch.streaming.lockstep import Lockstep
from offstage.stages.dispatch.streaming.module_state import ModuleState
from offstage.stages.hosts.wire import Arrival, _Inbox
from offstage.stages.units import Position
from tests.deadline import deadline
from tests.e2e.forked_hosts import run_alike
from tests.long_form import LONG_FORM, in_ci
from tests.stages.hosts.divided_models import CONFIGS
from tests.stages.hosts.lockstep_models import main

LIES = ("memory", "disk", "simulated", "simulated float32")
IN_FP8 = ("llama", "tied", "mixtral", "qwen3_moe")
HOSTS = (3, 2, 4)


def ways_of(name: str) -> list[str]:
    """Return where the weights of the model ``name`` may lie."""
    return [*LIES, *(["fp8"] if name in IN_FP8 else [])]


CASES = [
    (HOSTS[(row + column) % len(HOSTS)], name, lies)
    for row, name in enumerate(CONFIGS)
    for column, lies in enumerate(ways_of(name))
]
"""Each model with its weights at each place, and both over as many hosts as there may be, but not all three at once."""
Answers = Callable[[str, int], dict[str, list[Any]]]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Return a function that says what each host found, by where the weights of a model lie: one start for all that.

    What is the same in all starts, the rehearsals, they keep in one cache.
    """
    folder = tmp_path_factory.mktemp("hosts")
    is_long = bool(os.environ.get(LONG_FORM))

    @cache
    def found(name: str, hosts: int) -> dict[str, list[Any]]:
        here = [lies for count, model, lies in CASES if (count, model) == (hosts, name)]
        ways, seed = (here, int(time.time())) if is_long else (["memory"], 0)
        own = folder / f"{name}-{hosts}"
        own.mkdir()  # which fails for what a start that failed would have left
        run_alike(hosts, main, own, str(seed), name, *ways)
        whats = [*ways, *(["failing", "pace"] if name == "llama" else [])]
        return {
            what: [json.loads((own / f"{what}-{host}.json").read_text()) for host in range(hosts)] for what in whats
        }

    return found


@pytest.mark.parametrize(("hosts", "name", "lies"), in_ci((3, "llama", "memory"), of=CASES))
def test_every_call_has_what_it_has_alone_in_one_process(answers: Answers, hosts: int, name: str, lies: str) -> None:
    for host in answers(name, hosts)[lies]:
        assert host["differ"] == [], host
        assert host["prompts_alike"], host
        assert host["streams"] == (lies not in ("memory", "fp8")), host


@pytest.mark.parametrize("hosts", in_ci(3, of=HOSTS))
def test_a_call_that_fails_on_one_host_fails_on_all_and_no_other_does(answers: Answers, hosts: int) -> None:
    *others, last = answers("llama", hosts)["failing"]
    failing = ("alone", "in lockstep", "submitted")
    assert {last[way] for way in failing} == {"ValueError: this block is out of order"}
    said = f"FailedCallError: host {len(others)}: ValueError: this block is out of order"
    assert {host[way] for host in others for way in failing} == {said}
    for host in (*others, last):
        right = ("after one alone", "after lockstep", "beside it", "after cancelled ones", "begun again", "in the end")
        assert {name: host[name] for name in right} == dict.fromkeys(right, True)
        assert host["kept of calls"] == 0


@pytest.mark.parametrize("hosts", in_ci(3, of=HOSTS))
def test_a_call_that_is_cancelled_on_one_host_ends_on_all(answers: Answers, hosts: int) -> None:
    first, *others = answers("llama", hosts)["failing"]
    assert first["cancelled"] == ["CancelledError: ", "CancelledError: "]
    said = "FailedCallError: host 0: the call was cancelled"
    assert [host["cancelled"] for host in others] == [[said, said]] * len(others)


@pytest.mark.parametrize("hosts", in_ci(3, of=HOSTS))
def test_hosts_compute_at_once_what_calls_in_turn_have_them_wait_for(answers: Answers, hosts: int) -> None:
    paces = answers("llama", hosts)["pace"]
    assert min(paces) > 0.7 * len(paces), "as many times as soon as there are hosts, but for what else a token takes"


def order_of(grouping: Grouping, tasks: int, *, size: int, ending: list[int]) -> list[tuple[int, int]]:
    """Return which numbers join which groups as those of ``ending`` end in this order, if they are under way."""
    lanes, joined = Lanes([int] * tasks, size=size, grouping=grouping), list[tuple[int, int]]()
    for ended in [None, *ending]:
        if ended is not None:
            lanes.end(dict(joined)[ended])
        while (joining := lanes.next()) is not None:
            joined.append(joining[:2])
    return joined


def test_a_group_has_the_same_calls_in_the_same_order_whoever_ends_first() -> None:
    first = order_of(Grouping(2), 8, size=4, ending=[0, 2, 1, 3])
    other = order_of(Grouping(2), 8, size=4, ending=[3, 1, 2, 0])
    assert first[:4] == other[:4] == [(0, 0), (1, 1), (2, 0), (3, 1)]
    assert [each for each in first if each[1] == 0] == [each for each in other if each[1] == 0]
    assert first != other, "one group doesn't wait for the other"


def test_where_nothing_is_shared_each_call_is_a_group() -> None:
    assert order_of(Grouping(None), 4, size=2, ending=[1, 0]) == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert order_of(Grouping(2), 3, size=1, ending=[0, 1]) == [(0, 0), (1, 0), (2, 0)], "fewer together than groups"


def test_what_a_call_that_joins_waits_for_comes_after_the_pass_that_others_are_in() -> None:
    sent = SimpleQueue[tuple[str, Any]]()
    inbox = _Inbox(lambda host: sent.get())
    together, host, ended = Lockstep(2, ModuleState(nn.Module()), name="0"), 1, list[str]()

    def receive(position: Position) -> None:
        arrival = Arrival(inbox, (host, together.call), position)
        inbox.ask(arrival.key)
        together.receive(arrival)
        assert inbox.take(arrival.key) == together.call

    def one_pass(*received: Position) -> None:
        together.begin_pass()
        for position in received:
            receive(position)
        together.end_pass()
        ended.append(together.call)

    def stays() -> None:
        one_pass((5,))
        sent.put(("0.2", "0.2"))  # the other host has both in that pass before the third one joins there

    def joins() -> None:
        sent.put(("0.1", "0.1"))
        receive((1,))  # of an encoder, which is called before the first pass
        one_pass()

    with deadline(20), torch.no_grad():
        together.run([one_pass, stays, joins])
    assert ended == ["0.0", "0.1", "0.2"]
    sent.put(("", None))
