"""The runner with stages of its own, that note what was asked of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from offstage.pipeline.errors import BudgetError, CheckpointError, ConfigError, Fault
from offstage.pipeline.memory_monitor import MemoryMonitor
from offstage.pipeline.record import RunRecord
from offstage.pipeline.runner import Observer, Runner, check_config, installed_stages, load_stages
from offstage.pipeline.stage import Artifact, Config, Context, Report, Stage
from tests.e2e.pipelines import config_for


@dataclass(frozen=True)
class NoteInputs:
    """What a note depends on; ``number`` counts how often it was gathered, and is no part of the key."""

    value: Any
    before: Mapping[str, str]
    number: int = field(compare=False)


class Note:
    """A stage that depends on one option and on the content of the stages before it."""

    version = 1

    def __init__(self, log: list[str], name: str, option: str, after: tuple[str, ...] = (), live: bool = True) -> None:
        self.log, self.name, self.option, self.after, self.makes_live = log, name, option, after, live
        self.needs = after
        self.gathered: list[str] = []

    def check(self, config: Config) -> Iterable[Fault]:
        return ()

    def examine(self, config: Config) -> Iterable[Fault]:
        self.log.append(f"examine {self.name}")
        if config[self.option] == "unheard of":
            yield Fault(self.option, "unheard of")

    def gather(self, context: Context) -> NoteInputs:
        self.gathered.append(self.name)
        before = {name: context.artifact(name).digest("note.json") for name in self.after}
        return NoteInputs(context.config[self.option], before, len(self.gathered))

    def build(self, inputs: NoteInputs, context: Context, folder: Path) -> Any:
        self.log.append(f"build {self.name}")
        if inputs.value == "too much":
            raise BudgetError("too much")
        folder.joinpath("note.json").write_text(json.dumps(inputs.value))
        for name in self.after:
            context.live(name)
        return self.name if self.makes_live else None

    def revive(self, inputs: NoteInputs, context: Context) -> Any:
        assert inputs.number == len(self.gathered) == 1, "the same value that the key was made from"
        self.log.append(f"revive {self.name}")
        return self.name

    def report(self, artifact: Artifact) -> Report:
        return Report(summary=str(artifact.json("note.json")), metrics={"stall_seconds": 1.0})


class Lab:
    """Runs the three stages a → b → c in one folder and tells what happened."""

    def __init__(self, folder: Path, *, live: bool = True) -> None:
        self.folder, self.live, self.runs = folder, live, 0
        self.record: dict[str, Any] = {}
        self.live_names: list[set[str]] = []
        self.kind: type[Note] = Note

    def stages(self, log: list[str]) -> list[Note]:
        specs = [("a", ()), ("b", ("a",)), ("c", ("b",))]
        return [self.kind(log, name, name, after, self.live) for name, after in specs]

    def run(self, *, keep: int = 3, **options: Any) -> list[str]:
        log: list[str] = []
        self.runs += 1
        folder = self.folder / f"run{self.runs}"
        config = {"a": 1, "b": 1, "c": 1, "outputs": str(self.folder), **options}
        record = RunRecord.start(folder, overrides=[], config=config, environment={})
        try:
            with MemoryMonitor() as monitor:
                stages = self.stages(log)[:keep]
                runner = Runner(stages, config, record=record, monitor=monitor)
                runner.run()
                assert [stage.gathered for stage in stages] == [[stage.name] for stage in stages], "once a run"
                self.live_names.append(set(runner.chain._live))
        finally:
            self.record = json.loads(record.path.read_text())
        return log


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def built(log: list[str]) -> list[str]:
    return [line.removeprefix("build ") for line in log if line.startswith("build")]


def test_every_stage_is_built_once_and_then_served(lab: Lab) -> None:
    assert built(lab.run()) == ["a", "b", "c"]
    assert lab.run() == [], "a run that is served asks nothing of its stages"
    assert [stage["cached"] for stage in lab.record["stages"]] == [True, True, True]


def test_a_change_rebuilds_what_depends_on_it_and_nothing_else(lab: Lab) -> None:
    lab.run()
    assert built(lab.run(c=2)) == ["c"]
    assert built(lab.run(b=2)) == ["b", "c"]
    assert built(lab.run(b=2)) == []


def test_a_stage_whose_inputs_came_out_the_same_is_not_rebuilt(lab: Lab) -> None:
    lab.run()
    assert built(lab.run(a=2)) == ["a", "b"], "b's note is what it was, so c's key is too"


def test_a_prefix_is_shared_with_the_whole(lab: Lab) -> None:
    assert built(lab.run(keep=2)) == ["a", "b"]
    assert built(lab.run()) == ["c"]


def test_live_halves_made_on_the_way_are_not_made_again(lab: Lab) -> None:
    assert not [line for line in lab.run() if line.startswith("revive")]


def test_live_halves_of_cached_stages_are_made_when_asked_for(lab: Lab) -> None:
    lab.run()
    log = lab.run(c=2)
    assert [line for line in log if line.startswith("revive")] == ["revive b"]


def test_a_live_half_is_let_go_when_no_stage_will_ask_for_it(lab: Lab) -> None:
    lab.run()
    assert lab.live_names == [set()]


def test_only_stages_that_are_not_cached_are_examined(lab: Lab) -> None:
    lab.run()
    assert [line for line in lab.run(c=2) if line.startswith("examine")] == ["examine c"]


def test_faults_that_need_model_code_come_before_any_work(lab: Lab) -> None:
    with pytest.raises(ConfigError, match="c: unheard of"):
        lab.run(c="unheard of")
    assert not list((lab.folder / "cache").glob("*/*/manifest.json"))


def test_a_failed_build_leaves_no_artifact_and_the_next_run_makes_it(lab: Lab) -> None:
    with pytest.raises(BudgetError):
        lab.run(b="too much")
    assert not list((lab.folder / "cache" / "b").glob("*/"))
    assert built(lab.run()) == ["b", "c"]


def test_a_stage_that_needs_one_that_is_not_listed_says_so(tmp_path: Path) -> None:
    record = RunRecord.start(tmp_path / "run", overrides=[], config={}, environment={})
    config = {"b": 1, "outputs": str(tmp_path)}
    with MemoryMonitor() as monitor, pytest.raises(ConfigError, match="stages: 'a' must stand before"):
        Runner([Note([], "b", "b", ("a",))], config, record=record, monitor=monitor).run()


def test_a_record_outlines_what_a_key_is_made_of_and_not_what_is_for_the_work_alone(lab: Lab) -> None:
    lab.run()
    assert lab.record["stages"][0]["inputs"] == {"version": 1, "value": 1, "before": {}}


def test_the_record_says_what_ran_and_what_it_took(lab: Lab) -> None:
    lab.run()
    names = [stage["name"] for stage in lab.record["stages"]]
    assert names == ["a", "b", "c"]
    for stage in lab.record["stages"]:
        assert Path(stage["artifact"]).is_dir()
        assert stage["key"] == Path(stage["artifact"]).name
        assert stage["seconds"] > 0
        assert stage["peak_host_bytes"] > 2**20
    assert lab.record["metrics"]["stall_seconds"] == 1.0


class Slow(Note):
    """Takes its time, and memory, to come alive."""

    def revive(self, inputs: NoteInputs, context: Context) -> Any:
        import time

        time.sleep(1.0)  # far longer than the other stage, also where the machine is contended
        return super().revive(inputs, context)


def test_what_a_live_half_costs_is_charged_to_its_own_stage(tmp_path: Path) -> None:
    log: list[str] = []
    stages: list[Stage[NoteInputs]] = [Slow(log, "a", "a", live=False), Note(log, "b", "b", ("a",))]
    record = RunRecord.start(tmp_path / "run", overrides=[], config={}, environment={})
    with MemoryMonitor() as monitor:
        Runner(stages, {"a": 1, "b": 1, "outputs": str(tmp_path)}, record=record, monitor=monitor).run()
    seconds = {stage["name"]: stage["seconds"] for stage in record.data["stages"]}
    assert log[-1] == "revive a"
    assert seconds["a"] >= 1.0 > seconds["b"]


def test_the_five_stages_are_found_among_the_entry_points() -> None:
    assert {"empty_init", "plan", "shard_load", "dispatch", "generate"} <= set(installed_stages())
    names = ["empty_init", "plan", "shard_load"]
    loaded = load_stages({"stages": names, "stop_after": "plan"})
    assert [stage.name for stage in loaded] == ["empty_init", "plan"]
    assert all(isinstance(stage, Stage) for stage in loaded)


def test_all_faults_of_all_stages_come_as_one_error(tmp_path: Path) -> None:
    config = {
        "model": {"kind": "pretrained", "path": str(tmp_path / "gone"), "trust_remote_code": False},
        "dtype": "float33", "max_memory": {"cpu": "-1GB"}, "device_map": "balnced", "device_map_overrides": {},
        "offload_folder": None, "offload_state_dict": False, "hardware": {"devices": None},
        "storage": {"io": "auto"}, "trace": False,
        "generate": {"prompts": [], "beams": 3}, "stop_after": None, "seed": 0, "outputs": str(tmp_path),
        "stages": ["empty_init", "plan", "shard_load", "dispatch", "generate"],
    }  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        check_config(config)
    text = str(caught.value)
    words = [
        "model.path",
        "gone",
        "dtype: 'float33'",
        "max_memory.cpu",
        "'-1GB'",
        "device_map",
        "did you mean 'balanced'",
    ]
    assert all(word in text for word in [*words, "generate.prompts", "generate.beams"]), text


def test_two_faults_of_one_key_are_both_told(tmp_path: Path) -> None:
    limits = {"decode_second": 1, "perplexty": 2}
    config = {
        **config_for(tmp_path, tmp_path),
        "objective": {"metric": "load_seconds", "at_most": limits, "at_least": {}},
    }
    with pytest.raises(ConfigError) as caught:
        check_config(config)
    lines = [line for line in str(caught.value).splitlines() if line.startswith("objective.at_most: ")]
    assert [name for name, line in zip(limits, lines, strict=True) if f"'{name}' names no number" in line] == [*limits]


def test_faults_of_one_kind_keep_their_class(tmp_path: Path) -> None:
    from offstage.pipeline.errors import raise_faults

    with pytest.raises(CheckpointError, match=r"a: b\nc: d"):
        raise_faults([Fault("a", "b", CheckpointError), Fault("c", "d", CheckpointError)])
    raise_faults([])


class Teller(Note):
    """A note that shows text while it is written."""

    def build(self, inputs: NoteInputs, context: Context, folder: Path) -> Any:
        if context.show_text is not None:
            context.show_text("one")
            context.show_text("two")
        return super().build(inputs, context, folder)


class Onlooker(Observer):
    """Notes what is shown, and what was known of the stages before."""

    def __init__(self, *, sees: bool) -> None:
        self.sees_text = sees
        self.seen: list[tuple[str, str, list[str]]] = []

    def shows(self, stage: str, text: str, reports: Mapping[str, Report]) -> None:
        self.seen.append((stage, text, list(reports)))


@pytest.mark.parametrize("sees", [True, False])
def test_what_a_stage_shows_at_work_is_told_to_whoever_looks(tmp_path: Path, sees: bool) -> None:
    record = RunRecord.start(tmp_path / "run", overrides=[], config={}, environment={})
    config, onlooker = {"a": 1, "b": 1, "outputs": str(tmp_path)}, Onlooker(sees=sees)
    with MemoryMonitor() as monitor:
        stages = [Note([], "a", "a"), Teller([], "b", "b", ("a",))]
        Runner(stages, config, record=record, monitor=monitor, observer=onlooker).run()
    assert onlooker.seen == ([("b", "one", ["a"]), ("b", "two", ["a"])] if sees else [])


class Timed(Note):
    """A note that is measured as often as the config says, in all runs together."""

    measures = True

    def _kept(self, context: Context) -> Path:
        return context.cache / "times"

    def lacks_metrics(self, context: Context) -> bool:
        kept = self._kept(context)
        return not kept.exists() or len(kept.read_text()) < context.config["times"]

    def measure(self, inputs: NoteInputs, context: Context, report: Report, *, is_new: bool) -> Report:
        while self.lacks_metrics(context):
            context.live(self.name)
            self.log.append(f"measure {self.name}")
            with self._kept(context).open("a") as file:
                file.write("x")
        return Report(report.summary, repeats=({"earlier": not is_new, "counts": True},))


def test_a_stage_that_is_cached_is_measured_where_figures_are_lacking_and_only_there(lab: Lab) -> None:
    lab.kind = Timed
    assert lab.run(times=1, keep=1) == ["examine a", "build a", "measure a"]
    assert (lab.record["stages"][0]["cached"], lab.record["stages"][0]["measured"]) == (False, False)
    assert lab.run(times=1, keep=1) == []
    assert lab.run(times=3, keep=1) == ["revive a", "measure a", "measure a"]
    assert (lab.record["stages"][0]["cached"], lab.record["stages"][0]["measured"]) == (True, True)
    assert lab.record["repeats"] == [{"earlier": True, "counts": True}]
