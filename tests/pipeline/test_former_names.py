"""What the release before called otherwise: its configs and records are read by the names of today."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module

from offstage.pipeline import config as configs
from offstage.pipeline.errors import ConfigError, StorageError
from offstage.pipeline.former_names import CONFIG_KEYS, RECORD_KEYS, renamed
from offstage.pipeline.installed_stages import installed_metrics
from offstage.pipeline.record import RunRecord, read_run
from offstage.pipeline.report.command import run as report
from offstage.pipeline.run_schema import Run
from offstage.pipeline.signatures import sign_config
from offstage.stages.machine.rates import DEVICE_RATES, RATES
from offstage.stages.plan import token_time
from tests.json_schema import json_schema
from tests.pipeline.former_records import of_before
from tests.pipeline.report.sample_runs import repeat, write_run

OLD = re.compile(r"figures?|bound|samples?|busy|links?|(un)?pack(s|ed|ing)?|guess(es|ed|ing)?|slots?|told|found|held")
LOWER = re.compile(r"lower[ _]bound")
TIMES = [repeat(0.5), repeat(0.6, contended=True, earlier=True)]
LINKED = {
    "bottleneck": "host-to-device", "predicted_bottleneck": "dequantising", "repeats": 2, "contended_repeats": 1,
    "lower_bound_seconds_per_token": 0.25, "transfer_bytes_per_token.0": 10**9, "transfer_stall_seconds.0": 0.5,
}  # fmt: skip


@pytest.fixture(scope="module")
def hydra_tree() -> Iterator[None]:
    configs.register()
    with initialize_config_module("offstage.conf", version_base="1.3"):
        yield


def override(place: str, value: str) -> str:
    """Return the override that gives ``value`` at ``place``, of which each ``*`` is the first item of a list."""
    head, *inner = place.split(".*.")
    for below in reversed(inner):
        for key in reversed(below.split(".")):
            value = f"{{{key}: {value}}}"
        value = f"[{value}]"
    return f"{head}={value}"


def at(config: Any, place: str) -> Any:
    for key in place.split("."):
        config = config[0] if key == "*" else config[key]
    return config


def now(place: str) -> str:
    return f"{place.rpartition('.')[0]}.{CONFIG_KEYS[place]}"


@pytest.mark.usefixtures("hydra_tree")
@pytest.mark.parametrize("place", CONFIG_KEYS)
def test_a_config_key_of_before_is_taken_and_its_name_of_today_is_said_once(
    place: str, caplog: pytest.LogCaptureFixture
) -> None:
    configs._say_once.cache_clear()
    given = "load_seconds" if place == "objective.figure" else "7"
    for _ in range(2):
        config = configs.resolve(compose("config", [override(place, given)]))
    assert str(at(config, now(place))) == given
    before, after = (one.replace("*", "0") for one in (place, now(place)))
    assert [record.message for record in caplog.records] == [
        f"{before}: this key is {after} now, and by its old name it goes for this release only; rename it"
    ]


@pytest.mark.usefixtures("hydra_tree")
def test_what_is_asked_for_by_an_old_name_is_asked_for_by_the_one_of_today() -> None:
    asked = ["objective.figure=link_bytes_per_token.0", "objective.at_most.bound_seconds_per_token=3"]
    objective = configs.resolve(compose("config", asked))["objective"]
    assert objective == {
        "metric": "transfer_bytes_per_token.0",
        "at_most": {"lower_bound_seconds_per_token": 3},
        "at_least": {},
    }


@pytest.mark.usefixtures("hydra_tree")
def test_a_key_by_both_names_is_refused() -> None:
    both = ["hardware.rates.link=1GB", "hardware.rates.host_to_device=2GB"]
    said = "hardware.rates.link: it is hardware.rates.host_to_device now, which is there too; leave"
    with pytest.raises(ConfigError, match=re.escape(said)):
        configs.resolve(compose("config", both))


@pytest.mark.usefixtures("hydra_tree")
def test_a_slip_in_a_group_that_had_other_keys_is_still_a_fault() -> None:
    config = configs.resolve(compose("config", ["objective.metrik=load_seconds"]))
    assert [str(fault) for fault in configs.check(config, config["stages"])] == [
        "objective.metrik: unknown key (did you mean 'metric'?); offstage --cfg job shows every key"
    ]


def recorded(folder: Path) -> Path:
    """Return the ``run.json`` of a run with all that was called otherwise."""
    path = write_run(folder, metrics=LINKED, repeats=TIMES) / "run.json"
    record = json.loads(path.read_text())
    record["metric_table"] = installed_metrics().stored()
    record["config"] |= {
        "objective": {"metric": "transfer_bytes_per_token.0", "at_most": {"repeats": 9}, "at_least": {}},
        "hardware": {"rates": {"host_to_device": "1GB"}, "devices": [{"memory": "1GB", "host_to_device": "2GB"}]},
    }
    record["signature"] = sign_config(record["config"], record["places"])
    path.write_text(json.dumps(record))
    return path


def make_former(path: Path, *, sign: bool = True) -> None:
    old = of_before(json.loads(path.read_text()))
    if sign:
        old["signature"] = sign_config(old["config"], old["places"])
    path.write_text(json.dumps(old))


def test_a_record_of_before_says_what_the_same_run_says_today(tmp_path: Path) -> None:
    path = recorded(tmp_path / "0")
    today, strict = read_run(path), RunRecord.load(path)
    make_former(path)
    assert '"bound"' in path.read_text()
    then, carried_on = read_run(path), RunRecord.load(path)
    assert {**vars_of(then), "written": ""} == {**vars_of(today), "written": ""}
    assert (carried_on.run, dict(carried_on.data)) == (strict.run, dict(strict.data))
    assert carried_on.is_own


def vars_of(run: Run) -> dict[str, Any]:
    return {name: getattr(run, name) for name in run.__dataclass_fields__}


def test_a_stranger_s_record_of_before_stays_a_stranger_s(tmp_path: Path) -> None:
    path = recorded(tmp_path / "0")
    make_former(path, sign=False)
    assert not RunRecord.load(path).is_own


def test_runs_of_before_are_reported_and_compared_with_those_of_today(tmp_path: Path) -> None:
    for name in ("today", "before"):
        recorded(tmp_path / name / "0")
        write_run(tmp_path / name / "1", budget=2 * 10**9, metrics=LINKED, repeats=TIMES)
    for number in (0, 1):
        make_former(tmp_path / "before" / str(number) / "run.json")
    files = {}
    for name in ("today", "before"):
        report([str(tmp_path / name)])
        written = {suffix: (tmp_path / name / f"report.{suffix}").read_text() for suffix in ("csv", "tex")}
        files[name] = {suffix: text.replace(f"/{name}/", "/the runs/") for suffix, text in written.items()}
    assert files["before"] == files["today"]


def test_a_record_by_both_names_is_damaged(tmp_path: Path) -> None:
    path = recorded(tmp_path / "0")
    make_former(path)
    record = json.loads(path.read_text())
    record["metrics"]["bottleneck"] = "storage"
    path.write_text(json.dumps(record))
    with pytest.raises(StorageError, match=r"damaged: metrics.bound: it is metrics.bottleneck now, which is there too"):
        read_run(path)


def test_nothing_is_renamed_that_only_looks_like_it() -> None:
    untouched = {"outputs": [{"samples": 1, "bound": 2}], "config": {"vars": {"link": 1}}, "metrics": {"bounds": 3}}
    assert renamed(deepcopy(untouched), RECORD_KEYS, {}) == (untouched, {})


def named_in(node: Any) -> Iterator[str]:
    """Yield every key of ``node``, mappings in mappings and lists."""
    for item in node.values() if isinstance(node, Mapping) else node if isinstance(node, list | tuple) else ():
        yield from named_in(item)
    if isinstance(node, Mapping):
        yield from map(str, node)


def declared() -> Iterator[str]:
    """Yield each name that users read: of the config, the record, metrics and their titles, rates and bottlenecks."""
    yield from named_in(configs.default_config())
    for part in (schema := json_schema(Run), *schema["$defs"].values()):
        yield from part.get("properties", {})
    for metric in installed_metrics().metrics.values():
        yield from (metric.name, metric.title, metric.kind)
    yield from (*RATES, *DEVICE_RATES)
    yield from (word for name, word in vars(token_time).items() if name.isupper() and isinstance(word, str))


def test_no_name_of_before_is_declared() -> None:
    names = set(declared())
    assert names >= {
        "metric",
        "repeats",
        "bottleneck",
        "host_to_device",
        "host-to-device",
        "time a token",
        "lower_bound",
    }
    old = {name for name in names if any(OLD.fullmatch(word) for word in re.split(r"[\s._,-]+", LOWER.sub("", name)))}
    assert old == set()
