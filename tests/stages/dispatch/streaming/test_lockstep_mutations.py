"""What the grid of lockstep would find: each way to hand turns on wrongly fails its check."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from offstage.stages.dispatch.streaming.lockstep import Lockstep, Member
from offstage.stages.dispatch.streaming.streamed_part import StreamedPart
from tests.stages.dispatch.streaming.lockstep_grid import Prepared, Setting, prepare

_choose, _next, _resume = Lockstep._choose, Lockstep._next, Lockstep._resume


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    setting = Setting("llama", torch.float32, place="least", mode="sampled")
    return prepare(setting, tmp_path_factory.mktemp("mutations"))


def go_without_waiting(self: Lockstep, shared: Any) -> None:
    """Pass no turn on at a part: whoever comes there goes on."""


def prefer_the_first(self: Lockstep) -> None:
    """Give the turn back to the member that began first, before the others have come as far."""
    wants = self._members[0].wants if self._members else None
    if wants is None:
        _choose(self)
        return
    self._going.append(self._members[0])
    wants.expect(1)


def resume_another(self: Lockstep) -> Member | None:
    """Resume the member after the one whose turn it is."""
    member = _next(self)
    place = self._members.index(member) + 1 if member in self._members else 0
    return self._members[place % len(self._members)] if self._members else None


def expect_nobody(self: StreamedPart, users: int) -> None:
    """Have a part go when its first user leaves."""


def share_random_numbers(self: Lockstep, member: Member, go: Callable[[], object] | None = None) -> None:
    """Draw from the random numbers of the first member."""
    member.random = self._members[0].random
    _resume(self, member, go)


MUTATIONS: Mapping[str, tuple[type, str, Any]] = {
    "the turn isn't passed on": (Lockstep, "wait_for", go_without_waiting),
    "the turn goes back to one before its time": (Lockstep, "_choose", prefer_the_first),
    "a wrong member is resumed": (Lockstep, "_next", resume_another),
    "a part goes early": (StreamedPart, "expect", expect_nobody),
    "random numbers are another member's": (Lockstep, "_resume", share_random_numbers),
}


def test_as_it_is_the_check_passes(prepared: Prepared) -> None:
    prepared.check()


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_mutation_fails_the_check(name: str, prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTATIONS[name])
    with pytest.raises(AssertionError):
        prepared.check()
