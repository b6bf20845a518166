"""Weights come over several links at once: what that gains, and how layers must be dealt to devices for it.

A link is busy all the time only if layers are dealt in stripes no longer than what its reserve holds: while one device
computes, the others' links bring no more than fits there.
"""

import pytest

from tests.stages.dispatch.streaming.virtual_links import seconds_per_pass

LAYERS = 24


def striped(devices: int, stripe: int) -> list[int]:
    """Return which device computes each layer, where each has ``stripe`` layers in turn."""
    return [place // stripe % devices for place in range(LAYERS)]


def halved(devices: int) -> list[int]:
    """Return which device computes each layer, where each has one stretch of layers."""
    return [place * devices // LAYERS for place in range(LAYERS)]


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("stripe", [1, 2, 3])
def test_stripes_within_the_reserve_keep_all_links_busy(devices: int, stripe: int) -> None:
    assert seconds_per_pass(striped(1, 1), room=stripe) == LAYERS
    assert seconds_per_pass(striped(devices, stripe), room=stripe) == pytest.approx(LAYERS / devices)


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("room", [1, 2, 3])
def test_one_stretch_for_each_device_gains_no_more_than_its_reserves(devices: int, room: int) -> None:
    """While one device computes, the others' links bring what their reserves have room for, and then they wait."""
    assert seconds_per_pass(halved(devices), room=room) == pytest.approx(LAYERS - devices * room)


def test_weights_for_the_next_pass_come_while_the_last_layers_compute() -> None:
    busy = seconds_per_pass(striped(2, 2), room=2, computing=1.0)
    assert busy == pytest.approx(LAYERS, rel=0.05), "computing is the slower one, and never waits"


def test_storage_that_all_links_share_is_never_idle() -> None:
    assert seconds_per_pass(striped(2, 1), room=2, storage_seconds=2.0) == pytest.approx(2.0 * LAYERS)
