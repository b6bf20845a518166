"""Checkpoints by their Hub id: without a network from this machine's cache, else fetched, no more than is needed."""

import json
import shutil
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path

import pytest

import tests.e2e.conftest as harness
from offstage.stages.checkpoints.hub_headers import FOLDER
from tests.e2e.conftest import Finished, another_server, environment
from tests.e2e.fake_hub import COMMIT, FakeHub, serving, tag, without_ranges
from tests.e2e.fp8_checkpoints import CONFIGS, save_fp8
from tests.known_machine import copy_known
from tests.long_form import in_ci

Run = Callable[..., Finished]
TINY = Path(str(resources.files("offstage.conf") / "checkpoints" / "tiny"))
RUN = ("model.path=org/name", "max_memory.cpu=2MB", "generate.prompts=[[5,6,7]]", "generate.max_new_tokens=3")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The place of a Hub's cache for all of these tests: a server has imported by it."""
    return tmp_path_factory.mktemp("hf")


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's cache for all of these tests, with what is known of the machine; headers that are kept are theirs."""
    return copy_known(tmp_path_factory.mktemp("user"))


@pytest.fixture(scope="module")
def at_home(home: Path, user: Path) -> dict[str, str]:
    """A command's environment whose Hub's cache is at ``home``."""
    clean = {name: value for name, value in environment().items() if name not in ("HF_HUB_CACHE", "HF_TOKEN")}
    return {**clean, "HF_HOME": str(home), "XDG_CACHE_HOME": str(user.parent)}


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
def empty_home(home: Path, user: Path) -> Path:
    """An empty cache of a Hub; the folder that a repository has in it."""
    shutil.rmtree(home)
    shutil.rmtree(user / FOLDER, ignore_errors=True)
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
    hub.offer(TINY)
    hub.asked.clear()
    hub.sent.clear()
    monkeypatch.setattr(harness, "environment", lambda: variables)
    return hub


def lay_out(repository: Path, *, of: Path = TINY) -> None:
    """Put a checkpoint into a Hub's cache as huggingface_hub does: blobs, and a snapshot of links to them."""
    snapshot, blobs, refs = repository / "snapshots" / COMMIT, repository / "blobs", repository / "refs"
    for folder in (snapshot, blobs, refs):
        folder.mkdir(parents=True)
    (refs / "main").write_text(COMMIT)
    for file in (file for file in of.iterdir() if file.is_file()):
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


@pytest.mark.long_form
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


@pytest.mark.long_form
def test_the_files_of_every_tokenizer_come_with_the_config(offstage: Run, online: FakeHub, tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "served")
    kinds = {"source.spm", "target.spm", "bpe.codes", "vocab", "tokenizer.bin"}
    for name in kinds:
        (tmp_path / "served" / name).write_text(f"{name} of a tokenizer")
    online.offer(tmp_path / "served")
    done = offstage(*RUN, "stop_after=plan")
    assert done.code == 0, done.err
    assert kinds <= online.downloaded
    assert not [name for name in online.downloaded if name.endswith(".safetensors")]


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


@pytest.mark.long_form
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


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in FP8, in two shards, that could lie on the Hub."""
    return save_fp8(tmp_path_factory.mktemp("quantised"), CONFIGS["llama"])


PLAN = ("model.path=org/name", "stages=plan_only", "max_memory.cpu=150kB", "generate.prompts=[[5,6,7]]")


def size_of_header(file: Path) -> int:
    return 8 + int.from_bytes(file.read_bytes()[:8], "little")


@pytest.mark.from_nothing
@pytest.mark.parametrize("redirects", in_ci(True, of=[False, True]))
def test_a_quantised_checkpoint_is_planned_by_its_headers_alone(
    offstage: Run, offstage_here: Run, online: FakeHub, quantised: Path, redirects: bool
) -> None:
    online.offer(quantised)
    online.redirects = redirects
    planned = offstage(*PLAN)
    assert planned.code == 0, planned.err
    shards = {file.name: file for file in quantised.glob("*.safetensors")}
    assert {name: online.sent[name] for name in shards} == {name: size_of_header(file) for name, file in shards.items()}
    by_folder = offstage_here(f"model.path={quantised}", *PLAN[1:])
    assert by_folder.cached["empty_init"], "headers are the same wherever they come from"
    online.asked.clear()
    assert offstage(*PLAN, "max_memory.cpu=160kB").code == 0
    assert online.asked == [], "the network is asked once"


@pytest.mark.long_form
@pytest.mark.from_nothing
def test_a_run_after_the_plan_downloads_the_weights_and_keeps_the_skeleton(
    offstage: Run, online: FakeHub, quantised: Path
) -> None:
    online.offer(quantised)
    assert offstage(*PLAN).code == 0
    done = offstage("model.path=org/name", *PLAN[2:], "generate.max_new_tokens=2")
    assert done.code == 0, done.err
    assert done.cached["empty_init"]
    for file in quantised.glob("*.safetensors"):
        assert online.sent[file.name] == size_of_header(file) + file.stat().st_size


@pytest.mark.long_form
@pytest.mark.from_nothing
def test_a_plain_checkpoint_is_planned_quantised_by_its_headers_and_runs_so(offstage: Run, online: FakeHub) -> None:
    asked = (*RUN, "model.quantize=q8_0")
    planned = offstage(*asked, "stop_after=plan")
    assert planned.code == 0, planned.err
    shards = list(TINY.glob("*.safetensors"))
    assert [online.sent[file.name] for file in shards] == [size_of_header(file) for file in shards]
    done = offstage(*asked)
    assert done.code == 0, done.err
    assert done.cached["empty_init"]


@pytest.mark.long_form
@pytest.mark.from_nothing
def test_what_a_config_does_not_say_of_the_dtype_its_headers_do(offstage: Run, online: FakeHub, tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "silent")
    config = json.loads((tmp_path / "silent" / "config.json").read_text())
    config.pop("dtype", None)
    config.pop("torch_dtype", None)
    (tmp_path / "silent" / "config.json").write_text(json.dumps(config))
    online.offer(tmp_path / "silent")
    planned = offstage(*RUN, "stop_after=plan")
    assert planned.code == 0, planned.err
    assert list(planned.record["model"]["parameters"]) == ["bfloat16"]
    for file in TINY.glob("*.safetensors"):
        assert online.sent[file.name] == size_of_header(file)


@pytest.mark.from_nothing
def test_a_hub_without_ranges_is_one_line(offstage: Run, online: FakeHub, quantised: Path) -> None:
    online.offer(quantised)
    online.lie = without_ranges
    refused = offstage(*PLAN)
    lines = [line for line in refused.err.splitlines() if line.startswith("offstage: ")]
    assert refused.code == 3, refused.err
    assert len(lines) == 1, refused.err
    assert "of 'org/name' can't be had by ranges (status 200); download it first" in lines[0]
    assert "Traceback" not in refused.err


@pytest.mark.from_nothing
def test_headers_that_nobody_fetched_are_one_line_without_a_network(
    offstage: Run, hub_home: Path, quantised: Path
) -> None:
    lay_out(hub_home, of=quantised)
    for file in (hub_home / "snapshots" / COMMIT).glob("*.safetensors"):
        file.unlink()
    refused = offstage(*PLAN)
    assert refused.code == 3, refused.err
    assert "model.path: 'org/name' is no folder here" in refused.err
    assert "Traceback" not in refused.err


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
