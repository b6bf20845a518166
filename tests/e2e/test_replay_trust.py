"""Records from elsewhere: data. What they name as code doesn't run, what is damaged is refused, each in one line."""

import json
import math
import os
from collections.abc import Callable
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Replay, record_of, records_in
from tests.long_form import in_ci

Record = dict[str, Any]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, described: Path) -> Path:
    """The record of one completed run."""
    return record_of(tmp_path_factory.mktemp("finished"), described, "generate.max_new_tokens=2")


def sent(finished: Path, folder: Path, change: Callable[[Record], object]) -> Path:
    """Return a copy of the record ``finished``, changed, as somebody may have sent it."""
    record = deepcopy(json.loads(finished.read_text()))
    change(record)
    path = folder / "sent.json"
    path.write_text(json.dumps(record))
    return path


def module(**arguments: Any) -> Callable[[Record], object]:
    return lambda record: record["config"]["model"].update(kind="module", **arguments)


def gadgets(canary: str) -> dict[str, tuple[str, Callable[[Record], object]]]:
    """Return changes to a record that would make the file ``canary``, each with the word that the refusal asks for."""
    made = f"open({canary!r}, 'w').close()"
    code = "torch._inductor.codecache.PyCodeCache.load"
    logged = {"_target_": "logging.FileHandler", "filename": canary}
    copied = {"_target_": "shutil.copyfile", "src": "/etc/hostname", "dst": canary}
    return {
        "a shell": (code, module(_target_=code, source_code=made)),
        "a pickle": ("torch.load", module(_target_="torch.load", f="evil.pt", weights_only=False)),
        "a copy": ("shutil.copyfile", module(**copied)),
        "a log file": ("logging.FileHandler", module(**logged)),
        "a module of the current folder": ("evil.Net", module(_target_="evil.Net")),
        "a nested target": ("logging.FileHandler", module(_target_="torch.nn.Sequential", _args_=[logged])),
        "a class": ("evil.Net", lambda record: record["config"]["model"].update({"class": "evil.Net"})),
        "remote code": ("remote-code", lambda record: record["config"]["model"].update(trust_remote_code=True)),
        "remote code, as a text": (
            "remote-code", lambda record: record["config"]["model"].update(trust_remote_code="no")
        ),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("gadget", "trusted"),
    in_ci(
        *[(gadget, False) for gadget in gadgets("")], ("a shell", True), ("a module of the current folder", True),
        ("a nested target", True), ("remote code", True), of=product(gadgets(""), [False, True]),
    ),
)  # fmt: skip
def test_code_that_a_record_names_does_not_run(
    gadget: str, trusted: bool, finished: Path, replay: Replay, tmp_path: Path
) -> None:
    canary = tmp_path / "canary"
    tmp_path.joinpath("evil.py").write_text(f"open({str(canary)!r}, 'w').close()\nclass Net: pass\n")
    word, change = gadgets(str(canary))[gadget]
    path = sent(finished, tmp_path, change)
    trust = [flag for each in (word, "torch.nn.Sequential") for flag in ("--trust", each)]
    code, _, err = replay(path, *(trust if trusted else []))
    imported = trusted and gadget == "a module of the current folder"  # the user has said that its code may run
    assert canary.exists() == imported, err
    if trusted and word == "remote-code":
        return  # there is no such code in the embedded checkpoint
    assert (code, err.count("\n")) == (2, 1), err
    assert trusted or f"--trust={word}" in err


def test_nothing_is_written_where_a_record_says(finished: Path, replay: Replay, tmp_path: Path) -> None:
    other = tmp_path / "other"
    named = {"outputs": str(other), "offload_folder": str(other), "tracker": {"kind": "mlflow", "folder": str(other)}}
    path = sent(finished, tmp_path, lambda record: record["config"].update(named))
    code, _, err = replay(path)
    assert code == 0, err
    assert not other.exists()
    assert len(records_in(tmp_path)) == 1, "the replay's own, in outputs of the current folder"
    assert replay(path, "--outputs", tmp_path / "mine")[0] == 0
    assert list(tmp_path.glob("mine/runs/*/*/run.json"))


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


DAMAGES: dict[str, Callable[[Record], object]] = {
    "no status": lambda record: record.pop("status"),
    "no config": lambda record: record.pop("config"),
    "no outputs": lambda record: record.pop("outputs"),
    "another version": lambda record: record.update(schema_version=9),
    "a version that is no number": lambda record: record.update(schema_version=[1]),
    "a config that is a list": lambda record: record.update(config=[]),
    "an empty config": lambda record: record.update(config={}),
    "a config without a model": lambda record: record["config"].pop("model"),
    "a config without stages": lambda record: record["config"].pop("stages"),
    "a config without a seed": lambda record: record["config"].pop("seed"),
    "a key that isn't one": lambda record: record["config"].update(sed=1),
    "stages that are a number": lambda record: record["config"].update(stages=5),
    "a stage that isn't there": lambda record: record["config"].update(stages=["nothing"]),
    "a model that is a number": lambda record: record["config"].update(model=5),
    "a model without a kind": lambda record: record["config"]["model"].pop("kind"),
    "a path that is a number": lambda record: record["config"]["model"].update(path=5),
    "a class that is a list": lambda record: record["config"]["model"].update({"class": [1]}),
    "prompts that are a number": lambda record: record["config"]["generate"].update(prompts=7),
    "hardware that is a text": lambda record: record["config"].update(hardware="x"),
    "a budget that is a list": lambda record: record["config"].update(max_memory={"cpu": [1]}),
    "a device that isn't one": lambda record: record["config"].update(max_memory={"gpu": "1GB"}),
    "a device map that is a number": lambda record: record["config"].update(device_map=3.5),
    "entries of stages that are texts": lambda record: record.update(stages=["plan"]),
    "an entry of a stage without a key": lambda record: record["stages"][0].pop("key"),
    "inputs that are a list": lambda record: record["stages"][0].update(inputs=[1]),
    "token ids that are texts": lambda record: record["outputs"][0].update(token_ids=["a"]),
    "an environment that is null": lambda record: record.update(environment=None),
    "metrics that are a text": lambda record: record.update(metrics="fast"),
    "a metric that is no number": lambda record: record["metrics"].update(load_seconds=math.nan),
    "a metric without an end": lambda record: record["metrics"].update(load_seconds=math.inf),
    "a huge number": lambda record: record["config"].update(seed=10**300),
    "a device map that is a list": lambda record: record.update(device_map=[1]),
    "overrides that are numbers": lambda record: record.update(overrides=[1]),
    "lists in lists": lambda record: record["config"].update(trace=nested(500)),
}


@pytest.mark.parametrize(
    "damage",
    in_ci(
        "no status", "another version", "a config that is a list", "a config without a model", "a key that isn't one",
        "a stage that isn't there", "a path that is a number", "prompts that are a number", "a budget that is a list",
        "a device that isn't one", "an entry of a stage without a key", "token ids that are texts",
        "an environment that is null", "a metric without an end", "a huge number", "lists in lists", of=DAMAGES,
    ),
)  # fmt: skip
def test_a_damaged_record_is_refused_in_one_line(damage: str, finished: Path, replay: Replay, tmp_path: Path) -> None:
    code, _, err = replay(sent(finished, tmp_path, DAMAGES[damage]))
    assert (code, "Traceback" in err) == (2, False), err
    assert err.count("\n") == 1, err
    assert not list(tmp_path.glob("outputs/runs/*/*/.cache"))


FILES: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: path.write_bytes(b""),
    "bytes that are no text": lambda path: path.write_bytes(b"\xff\xfe{}"),
    "deep": lambda path: path.write_text("[" * 200_000),
    "deep and closed": lambda path: path.write_text('{"a":' * 100_000 + "1" + "}" * 100_000),
    "a long number": lambda path: path.write_text('{"schema_version": ' + "9" * 10_000 + "}"),
    "a list": lambda path: path.write_text("[]"),
    "a folder": lambda path: path.mkdir(),
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to nowhere": lambda path: path.symlink_to("nowhere"),
    "huge": lambda path: (path.touch(), os.truncate(path, 2**33)),
}


@pytest.mark.parametrize("file", FILES)
def test_a_file_that_is_no_record_is_refused_in_one_line(file: str, replay: Replay, tmp_path: Path) -> None:
    path = tmp_path / "sent.json"
    FILES[file](path)
    code, _, err = replay(path)
    assert (code, err.count("\n"), "Traceback" in err) == (2, 1, False), err
