"""A seeded sample of the storage's faults, and whether what chooses and judges them sees what it must.

``python -m tests.faults`` tries many more, by hand.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.test_faults import may_trace
from tests.e2e.warm_server import IMPORTED
from tests.faults.campaign import TracedScenario, choose, rehearse
from tests.faults.fork_server import ForkServer
from tests.faults.system_calls import CREATED, LISTED, OPENED, READ, SystemCall, read_calls

pytestmark = pytest.mark.skipif(not may_trace(), reason="strace isn't here, or may not trace")
SAMPLES, SEED = [2, pytest.param(4, marks=pytest.mark.long_form)], 11


@pytest.fixture(scope="module")
def stores(described: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, TracedScenario]]:
    """The scenario that also fills an offload store, ready for faults."""
    with ForkServer() as server:
        server.import_modules(IMPORTED)  # once, not in its first fork as well
        try:
            yield rehearse(tmp_path_factory.mktemp("faults"), server, ["stores"], described=described)
        except OSError as error:
            pytest.skip(str(error))


def test_every_call_that_a_run_makes_on_its_storage_is_seen(stores: dict[str, TracedScenario]) -> None:
    seen = {(call.name, call.kind) for call in stores["stores"].calls}
    assert {name for name, _ in seen} >= {
        "openat", "read", "write", "fsync", "rename", "link", "unlink", "mkdir", "getdents64", "newfstatat", "flock",
        "close",
    }  # fmt: skip
    assert seen & {("preadv", "outputs/cache/STAGE/*/*.dat"), ("preadv2", "outputs/cache/STAGE/*/*.dat")}
    assert seen >= {
        ("link", "outputs/runs/DAY/RUN/.tmp-*"),
        ("rename", "outputs/cache/STAGE/.tmp-*"),
        ("fsync", "outputs/cache/STAGE/*"),
        ("flock", "outputs/cache/STAGE/.*.lock"),
    }


@pytest.mark.parametrize("sample", SAMPLES)
def test_a_run_whose_storage_fails_once_ends_by_the_table_and_the_next_is_right(
    sample: int, stores: dict[str, TracedScenario]
) -> None:
    outcomes = [stores[fault.scenario].attempt(fault) for fault in choose(stores, SEED)[:sample]]
    assert [(str(outcome.fault), outcome.code, outcome.wrong) for outcome in outcomes if outcome.wrong] == []
    assert sum(bool(outcome.hit) for outcome in outcomes) >= sample / 2, "the faults don't reach their calls"


PLAN = Path("/w/outputs/cache/plan")
LOG = """\
100 openat(AT_FDCWD</w>, "outputs/cache/plan", O_RDONLY|O_CLOEXEC|O_DIRECTORY) = 3</w/outputs/cache/plan>
100 openat(AT_FDCWD</w>, "/etc/passwd", O_RDONLY) = 3</etc/passwd>
100 openat(AT_FDCWD</w>, "/w/outputs/runs/2026-11-21/10-10-35-688934-26760/run.log", O_RDONLY) = 3</w/a>
100 openat(AT_FDCWD</w>, "/w/outputs/cache/plan/.tmp-HEX", O_WRONLY|O_CREAT) = 4</w/a>
100 openat(AT_FDCWD</w>, "/w/outputs/cache/plan", O_RDONLY|O_CLOEXEC|O_DIRECTORY) = 3</w/outputs/cache/plan>
107 preadv2(9</w/checkpoint/model-00001-of-00004.safetensors>, [], 1, 0, 0 <unfinished ...>
107 <... preadv2 resumed>) = 4096
107 preadv2(9</w/outputs/cache/offload/HEX/lm_head.weight.dat>, [], 1, 0, 0) = -1 EIO (INJECTED)
""".replace("HEX", "0123456789abcdef" * 2)


def test_calls_are_counted_by_thread_and_places_told_by_their_kind(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(LOG)
    shard = Path("/w/checkpoint/model-00001-of-00004.safetensors")
    tensor = Path("/w/outputs/cache/offload/HEX/lm_head.weight.dat".replace("HEX", "0123456789abcdef" * 2))
    assert list(read_calls(log, Path("/w"))) == [
        SystemCall(0, "openat", 1, "outputs/cache/plan", PLAN, LISTED, injected=False),
        SystemCall(0, "openat", 3, "outputs/runs/DAY/RUN/run.log", None, OPENED, injected=False),
        SystemCall(0, "openat", 4, "outputs/cache/plan/.tmp-*", None, CREATED, injected=False),
        SystemCall(0, "openat", 2, "outputs/cache/plan", PLAN, LISTED, injected=False),
        SystemCall(1, "preadv2", 1, "checkpoint/model-*.safetensors", shard, READ, injected=False),
        SystemCall(1, "preadv2", 1, "outputs/cache/offload/*/*.dat", tensor, READ, injected=True),
    ]
