"""Contexts for tests of training, on a simulated accelerator and on a host that has a disk."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from offstage.stages.finetune import CPUOffload
from offstage.stages.machine.devices import Devices
from tests.operator_threads import in_threads

GIB = 2**30


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with in_threads(1):
        yield


@pytest.fixture(params=["ledger", "disk"])
def offload(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., CPUOffload]:
    """Make contexts for a simulated accelerator that offloads to the host, or for a host that offloads to disk."""
    where: dict[str, Any] = {"target": "disk", "folder": tmp_path} if request.param == "disk" else {}
    if request.param == "ledger":
        where = {"devices": Devices({0: GIB})}

    def make(ratio: float, tag: str = request.node.name, **options: Any) -> CPUOffload:
        return CPUOffload(ratio, tag, **where, **options)

    return make
