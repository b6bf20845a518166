"""What ends hosts that run together: some of the table's scenes in CI, all of them three times in the long form."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import environment
from tests.e2e.warm_server import WarmServer
from tests.faults.host_scenes import SCENES
from tests.faults.hosts import attempt, begin
from tests.long_form import in_ci

Begun = tuple[Path, WarmServer, list[list[int]]]
_SCENES = {scene.name: scene for scene in SCENES}
_CI = ("killed in shard_load, host 1", "another checkpoint", "hosts of two runs", "a misspelt key, host 1")
pytestmark = pytest.mark.skipif(
    not hasattr(os, "pidfd_open") or os.getuid() != 0, reason="scenes of hosts need root, on Linux"
)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Begun]:
    """Yield what hosts begin with: a cache, a server of warm processes, and the tokens of one host."""
    server = WarmServer(environment({"OMP_NUM_THREADS": "1"}))
    cache, tokens = begin(tmp_path_factory.mktemp("described"), server)
    yield cache, server, tokens
    server.close()


@pytest.mark.parametrize("name", in_ci(*_CI, of=_SCENES))
def test_all_hosts_end_and_say_why_and_the_next_run_is_right(begun: Begun, name: str) -> None:
    cache, server, tokens = begun
    rounds = 3 if os.environ.get("OFFSTAGE_LONG") else 1
    found = [attempt(_SCENES[name], cache, server, tokens) for _ in range(rounds)]
    assert not [fault for each in found for fault in each.faults], found
