"""What hosts send each other comes as it was; of calls of the model that are over a host keeps nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from offstage.stages.hosts.wire import _MOST_OVER, FailedCallError, _Inbox
from tests.e2e.forked_hosts import run_alike
from tests.stages.hosts.messages import AT_ONCE, MESSAGES, main

HOST = 1


@pytest.fixture
def sent() -> Iterator[SimpleQueue[tuple[str, Any]]]:
    """Yield what another host sends, which then goes away."""
    queue: SimpleQueue[tuple[str, Any]] = SimpleQueue()
    yield queue
    queue.put(("0", None))


def remembered(inbox: _Inbox) -> int:
    """Return how many entries ``inbox`` has of all calls that aren't over."""
    return sum(len(kept) for kept in (inbox._messages, inbox._missing, inbox._failed))


def test_of_calls_that_are_over_the_last_ones_are_known(sent: SimpleQueue[tuple[str, Any]]) -> None:
    inbox = _Inbox(lambda host: sent.get())
    for number in range(2 * _MOST_OVER):
        inbox.end(f"queue.{number}")
    assert len(inbox._over) == _MOST_OVER
    for late in (f"queue.{2 * _MOST_OVER - 1}", f"queue.{_MOST_OVER}", f"queue.{_MOST_OVER}.2"):
        inbox._keep(HOST, late, "nobody's")
    assert remembered(inbox) == 0
    inbox._keep(HOST, f"queue.{2 * _MOST_OVER}", "the next")
    assert remembered(inbox) == 1


def test_nothing_is_kept_of_calls_that_failed_here_or_there(sent: SimpleQueue[tuple[str, Any]]) -> None:
    inbox, sizes = _Inbox(lambda host: sent.get()), list[int]()
    for number in range(60):
        ours, theirs = f"queue.{2 * number}", f"queue.{2 * number + 1}"
        sent.put((theirs, FailedCallError("host 1: its memory was full")))
        inbox.ask((HOST, theirs))
        inbox.wait([(HOST, theirs)])
        with pytest.raises(FailedCallError, match="its memory was full"):
            inbox.take((HOST, theirs))
        inbox.end(theirs)
        inbox.ask((HOST, ours))
        inbox.end(ours)  # it fails here, and what the other host sends of it comes later
        sent.put((ours, "a hidden state"))
        sizes.append(remembered(inbox))
    assert max(sizes) <= 1, "what has come at once"
    sent.put(("queue.120", "the next"))
    inbox.ask((HOST, "queue.120"))
    inbox.wait([(HOST, "queue.120")])
    assert inbox.take((HOST, "queue.120")) == "the next"


def test_what_a_call_is_told_before_it_begins_is_kept_until_it_is_over(sent: SimpleQueue[tuple[str, Any]]) -> None:
    inbox = _Inbox(lambda host: sent.get())
    for message in (("3", FailedCallError("host 1: it failed")), ("4.0", "early"), ("2.0", "in time")):
        sent.put(message)
    inbox.ask((HOST, "2.0"))
    inbox.wait([(HOST, "2.0")])
    assert inbox.take((HOST, "2.0")) == "in time"
    inbox.ask((HOST, "3.1"))
    with pytest.raises(FailedCallError):
        inbox.take((HOST, "3.1"))
    inbox.end("3")
    inbox.ask((HOST, "4.0"))
    assert inbox.take((HOST, "4.0")) == "early"


def test_messages_of_all_lengths_and_types_come_as_they_were_and_a_tokens_go_at_once(tmp_path: Path) -> None:
    run_alike(2, main, tmp_path)
    for host in range(2):
        parts = json.loads((tmp_path / f"parts-{host}.json").read_text())
        assert parts == {name: 1 if name in AT_ONCE else 2 for name in MESSAGES}
