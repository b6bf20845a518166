"""Where parts lie that stay while others come and go, and the least memory that holds what is there at once."""

from __future__ import annotations

import random

import pytest

from offstage.stages.plan.lasting_parts import place_lasting

MIXER = {"mixer": ("mixer",), "conv": ("mixer.conv", "mixer"), "in": ("mixer.in",), "out": ("mixer.out",)}


def test_what_a_mixer_holds_and_borrows_lies_side_by_side_at_the_end() -> None:
    sizes = {"mixer": 100, "conv": 500, "in": 3000, "out": 2000}
    places = place_lasting(MIXER, sizes, alignment=512)
    assert sorted(places.places.items()) == [("conv", 1024), ("mixer", 512)]
    assert (places.bytes, places.least) == (1024, 1024 + 3072)
    assert place_lasting(MIXER, sizes).least == 100 + 500 + 3000


def test_parts_that_are_never_there_together_share_a_place() -> None:
    callers = {"a": ("0.mixer",), "a in": ("0.mixer.in",), "b": ("1.mixer",), "b in": ("1.mixer.in",)}
    places = place_lasting(callers, {"a": 10, "a in": 70, "b": 30, "b in": 50})
    assert places.places == {"a": 10, "b": 30}
    assert places.least == 80


def test_where_each_part_is_alone_none_lasts_and_the_largest_is_the_least() -> None:
    places = place_lasting({"a": ("0.a",), "b": ("0.b",)}, {"a": 10, "b": 33}, alignment=512)
    assert (places.places, places.bytes, places.least) == ({}, 0, 33)


@pytest.mark.parametrize("seed", range(20))
def test_what_lasts_together_never_overlaps_and_the_least_has_room_for_what_comes(seed: int) -> None:
    chance = random.Random(seed)
    names = ["", "a", "a.b", "a.b.c", "a.d", "a.d.e", "f", "f.g"]
    callers = {name: (name, *chance.sample(names, chance.choice([0, 0, 1]))) for name in names}
    sizes = {name: chance.randint(1, 3000) for name in names}
    places = place_lasting(callers, sizes, alignment=512)
    spans = {name: range(end - -(-sizes[name] // 512) * 512, end) for name, end in places.places.items()}
    for call in names:
        around = {name for name in names if any(f"{call}.".startswith(f"{up}." * bool(up)) for up in callers[name])}
        lasting = [name for name in around if name in spans]
        for one in lasting:
            for other in lasting:
                assert one == other or not {*spans[one]} & {*spans[other]}, (call, one, other)
        extent = max((places.places[name] for name in lasting), default=0)
        assert extent + max((sizes[name] for name in around if name not in spans), default=0) <= places.least
