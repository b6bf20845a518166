import pytest
import torch

from stages.dispatch.accelerate_api.by_device_map import Dispatch, dispatch
from stages.dispatch.streaming.guard import is_guarded
from tests.stages.dispatch.models_to_offload import Net, seeded


def asked(**device_map: int | str) -> Dispatch:
    return Dispatch(
        device_map=device_map,
        main_device=None,
        state_dict=None,
        folder=None,
        index=None,
        offload_buffers=False,
        skip_keys=None,
        preload=None,
    )


@pytest.mark.parametrize(
    ("devices", "main", "away"),
    [
        ({"a": "disk", "b": 1, "c": 0}, 1, {"disk", "cpu"}),
        ({"a": "cpu", "b": "disk"}, "cpu", {"disk"}),
        ({"a": "cpu"}, "cpu", {"disk"}),
    ],
)
def test_the_first_accelerator_of_the_map_computes_what_is_brought_in(
    devices: dict[str, int | str], main: int | str, away: set[str]
) -> None:
    wanted = asked(**devices)
    assert wanted.main == main
    assert {device for device in ("cpu", "disk") if wanted.is_away(device)} == away
    assert all(wanted.computes_on(device) == main for device in away)


def test_a_model_is_dispatched_by_the_names_in_the_map() -> None:
    expected, x = seeded(Net), torch.randn(2, 3)
    model = dispatch(seeded(Net), asked(linear1="cpu", batchnorm="cpu", linear2="cpu"))
    assert is_guarded(model)
    assert torch.equal(model(x), expected(x))
