"""Checkpoints by their Hub id: without a network from this machine's cache, else fetched, no more than is needed."""

import shutil
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path

import pytest

import tests.e2e.conftest as harness
from tests.e2e.conftest import Finished, another_server, environment
from tests.e2e.fake_hub import COMMIT, FakeHub, serving, tag

Run = Callable[..., Finished]
TINY = Path(str(resources.files("conf") / "checkpoints" / "tiny"))
RUN = ("model.path=org/name", "max_memory.cpu=2MB", "generate.prompts=[[5,6,7]]", "generate.max_new_tokens=3")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The place of a Hub's cache for all of these tests: a server has imported by it."""
    return tmp_path_factory.mktemp("hf")


@pytest.fixture(scope="module")
def at_home(home: Path) -> dict[str, str]:
    """A command's environment whose Hub's cache is at ``home``."""
    clean = {name: value for name, value in environment().items() if name not in ("HF_HUB_CACHE", "HF_TOKEN")}
    return {**clean, "HF_HOME": str(home)}


@pytest.fixture(scope="module")
def _offline(at_home: dict[str, str]) -> Iterator[None]:
    with another_server(at_home):
        yield


@pytest.fixture(scope="module")
def _online(at_home: dict[str, str]) -> Iterator[tuple[FakeHub, dict[str, str]]]:
    online = {name: value for name, value in at_home.items() if name != "HF_HUB_OFFLINE"}
    with serving(TINY) as hub, another_server({**online, "HF_ENDPOINT": hub.endpoint}):
        yield hub, {**online, "HF_ENDPOINT": hub.endpoint}


@pytest.fixture
def empty_home(home: Path) -> Path:
    """An empty cache of a Hub; the folder that a repository has in it."""
    shutil.rmtree(home)
    home.mkdir()
    return home / "hub" / "models--org--name"


@pytest.fixture
def hub_home(_offline: None, empty_home: Path, at_home: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of a Hub that can't be reached; the folder that a repository has in it."""
    monkeypatch.setattr(harness, "environment", lambda: at_home)
    return empty_home


@pytest.fixture
def online(_online: tuple[FakeHub, dict[str, str]], empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    """A Hub on this machine that serves the embedded model."""
    hub, variables = _online
    hub.asked.clear()
    monkeypatch.setattr(harness, "environment", lambda: variables)
    return hub


def lay_out(repository: Path) -> None:
    """Put the embedded model into a Hub's cache as huggingface_hub does: blobs, and a snapshot of links to them."""
    snapshot, blobs, refs = repository / "snapshots" / COMMIT, repository / "blobs", repository / "refs"
    for folder in (snapshot, blobs, refs):
        folder.mkdir(parents=True)
    (refs / "main").write_text(COMMIT)
    for file in (file for file in TINY.iterdir() if file.is_file()):
        (blobs / tag(file)).write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/{tag(file)}")


@pytest.mark.from_nothing
def test_what_the_cache_holds_runs_without_a_network(offstage: Run, offstage_here: Run, hub_home: Path) -> None:
    lay_out(hub_home)
    by_id = offstage(*RUN)
    assert by_id.code == 0, by_id.err
    assert by_id.record["config"]["model"]["path"] == "org/name"
    by_folder = offstage_here(f"model.path={hub_home / 'snapshots' / COMMIT}", *RUN[1:])
    assert by_folder.tokens == by_id.tokens
    assert by_folder.cached["empty_init"], "one model under two names has one skeleton"
    assert offstage(*RUN, f"model.revision={COMMIT}", "stop_after=plan").code == 0


def test_a_tokenizer_may_come_from_the_hub(offstage: Run, offstage_here: Run, hub_home: Path, tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*", "special*", "vocab*"))
    run = (f"model.path={tmp_path / 'bare'}", "model.tokenizer=org/name", "generate.prompts=[a cue]", *RUN[3:])
    refused = offstage(*run)
    assert refused.code == 3, refused.err
    assert "model.tokenizer: 'org/name' is no folder here" in refused.err
    lay_out(hub_home)
    done = offstage(*run)
    assert done.code == 0, done.err
    assert done.record["outputs"][0]["text"]
    assert done.tokens == offstage_here(f"model.path={TINY}", *run[2:]).tokens


@pytest.mark.parametrize("gone", ["everything", "a shard", "the config"])
def test_what_the_cache_lacks_is_one_line_that_names_the_id(offstage: Run, hub_home: Path, gone: str) -> None:
    if gone != "everything":
        lay_out(hub_home)
        name = "config.json" if gone == "the config" else "model-00002-of-*.safetensors"
        for file in (hub_home / "snapshots" / COMMIT).glob(name):
            file.unlink()
    done = offstage(*RUN)
    lines = [line for line in done.err.splitlines() if line.startswith("offstage: ")]
    assert done.code == 3, done.err
    assert len(lines) == 1, done.err
    for words in ("model.path: 'org/name' is no folder here", "HF_HUB_OFFLINE", "give the folder of a checkpoint"):
        assert words in lines[0]
    assert "Traceback" not in done.err


def test_a_plan_fetches_no_weights_and_a_run_fetches_them_once(offstage: Run, online: FakeHub) -> None:
    planned = offstage(*RUN, "stop_after=plan")
    assert planned.code == 0, planned.err
    assert "config.json" in online.downloaded
    assert not [name for name in online.downloaded if name.endswith(".safetensors")]
    first = offstage(*RUN)
    assert first.code == 0, first.err
    shards = {file.name for file in TINY.glob("*.safetensors")}
    assert shards <= online.downloaded
    online.asked.clear()
    second = offstage(*RUN, "seed=1")
    assert second.code == 0, second.err
    assert online.asked == []


def test_an_id_that_the_hub_does_not_know_is_one_line(offstage: Run, online: FakeHub) -> None:
    done = offstage("model.path=org/nothing")
    assert done.code == 3, done.err
    assert "model.path: 'org/nothing' is no folder here" in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("revision", "words"), [("3", "3 is no revision"), ("v1", "'v1' is of no use"), ("''", "'' is no revision")]
)
def test_a_revision_that_means_nothing_is_refused(offstage_here: Run, revision: str, words: str) -> None:
    done = offstage_here(f"model.path={TINY}", f"model.revision={revision}")
    assert done.code == 2
    assert f"model.revision: {words}" in done.err
