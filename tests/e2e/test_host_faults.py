"""What ends hosts that run together: some of the table's scenes in CI, all of them three times in the long form."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path

import pytest

from tests.e2e.conftest import environment, warm_server
from tests.e2e.warm_server import WarmServer
from tests.faults.host_scenes import SCENES
from tests.faults.hosts import attempt, begin
from tests.long_form import in_ci

Begun = tuple[Path, list[list[int]], WarmServer]
_SCENES = {scene.name: scene for scene in SCENES}
_CI = ("killed in generate, host 1", "SIGINT, host 0 waits for host 1", "SIGTERM, host 1 waits for host 0")
pytestmark = pytest.mark.skipif(
    not hasattr(os, "pidfd_open") or os.getuid() != 0, reason="scenes of hosts need root, on Linux"
)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Begun]:
    """Yield what hosts begin with: a cache, the tokens of one host, and a server of warm processes."""
    variables = environment({"OMP_NUM_THREADS": "1"})
    shared = warm_server(variables)
    with nullcontext(shared) if shared else closing(WarmServer(variables)) as server:
        yield *begin(tmp_path_factory.mktemp("described"), server), server


@pytest.mark.parametrize("name", in_ci(*_CI, of=_SCENES))
def test_all_hosts_end_and_say_why_and_the_next_run_is_right(begun: Begun, name: str) -> None:
    cache, tokens, server = begun
    rounds = 3 if os.environ.get("OFFSTAGE_LONG") else 1
    outcomes = [attempt(_SCENES[name], cache, server, tokens) for _ in range(rounds)]
    assert not [fault for each in outcomes for fault in each.faults], outcomes
