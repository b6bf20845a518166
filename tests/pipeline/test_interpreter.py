"""The search for cycles, put off."""

import gc
from collections.abc import Iterator

import pytest

from offstage.pipeline import interpreter
from offstage.pipeline.interpreter import uncollected


@pytest.fixture(autouse=True)
def collecting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(interpreter, "_frozen_once", False)
    gc.enable()
    gc.unfreeze()  # what the tests' own imports are
    yield
    gc.enable()
    gc.freeze()


def test_nothing_is_looked_at_in_the_block_and_what_it_made_is_old_afterwards() -> None:
    begun: list[str] = []
    with uncollected():
        gc.callbacks.append(lambda phase, _: begun.append(phase))
        made = [[number] for number in range(10_000)]
        assert not gc.isenabled()
        gc.callbacks.pop()
    young = gc.get_objects(generation=0)
    assert not begun
    assert gc.isenabled()
    assert not any(one is made for one in young)
    assert any(one is made for one in gc.get_objects(generation=2))


def test_it_stays_off_where_it_was_off() -> None:
    gc.disable()
    with uncollected():
        pass
    assert not gc.isenabled()


def test_what_was_frozen_stays_frozen() -> None:
    gc.freeze()
    with uncollected():
        made = [[number] for number in range(10)]
    assert gc.get_freeze_count()
    assert not any(one is made for one in gc.get_objects(generation=2))


def test_what_was_frozen_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    count, counts = gc.get_freeze_count, []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counts.append(count()) or counts[-1])
    with uncollected():
        pass
    gc.freeze()
    for _ in range(3):
        with uncollected():
            pass
    assert [bool(each) for each in counts] == [False, True]
