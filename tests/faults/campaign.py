"""Faults one after another: which there are to try, each tried, and what came of it."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from offstage.pipeline.cache import housekeeping
from tests.faults.fork_server import ForkServer, Shortening
from tests.faults.scenarios import OUTPUTS, SCENARIOS, Scenario, ScenarioFolder
from tests.faults.system_calls import ERRORS, RETRIED, SHORT_COUNT, SystemCall, read_calls, read_countable

CODES = frozenset({0, 2, 3, 4, 5})
_WARNING = re.compile(r"^\d{4}-\d\d-\d\d \S+ WARNING ")
_SECONDS = 250


@dataclass(frozen=True, slots=True)
class StorageFault:
    """One call of a scenario, and the error that it gives."""

    scenario: str
    call: SystemCall
    error: str

    def __str__(self) -> str:
        return f"{self.scenario}: {self.call.name} {self.call.place} #{self.call.number}: {self.error}"


@dataclass(frozen=True, slots=True)
class FaultOutcome:
    """What came of a fault: the exit code, the line on standard error, the stage that the record names, the calls that
    did fail, and what isn't as it must be.
    """

    fault: StorageFault
    code: int
    line: str
    stage: str | None
    hit: Sequence[str]
    wrong: Sequence[str] = field(default_factory=tuple)


class TracedScenario:
    """A scenario that ran once without a fault: its calls and its answer are known.

    With ``library``, made of ``short_counts.c`` and loaded into the ``server``, its faults are short counts. A cache
    in which this machine is ``described`` spares the first run to find that out.
    """

    def __init__(
        self, scenario: Scenario, server: ForkServer, root: Path, library: Path | None = None,
        *, described: Path | None = None,
    ) -> None:  # fmt: skip
        self.scenario, self._server, self._library = scenario, server, library
        folder = root / scenario.name.replace(" ", "-")
        folder.mkdir(parents=True)
        self.stage = ScenarioFolder(scenario, folder)
        if described is not None:
            shutil.copytree(described, folder / OUTPUTS / "cache")
        self._log = root / f"{folder.name}.log"
        modules = root / "modules.json"
        server.fork(self.stage.arguments, folder=folder, modules=modules)
        code = server.go()
        assert code == 0, (code, self.stderr)
        server.import_modules(json.loads(modules.read_text()))
        self.answer = self.stage.records()[-1]["outputs"]
        self.stage.keep()
        self.stage.restore()
        code = self._shortened("", 0) if library else self._traced(",".join(f"?{name}" for name in ERRORS))
        assert code == 0, (code, self.stderr)
        self.calls = [call for call in self._logged() if _matters(call)]

    @property
    def stderr(self) -> str:
        """What the last run said on standard error."""
        return (self.stage.folder / "stderr").read_text()

    def faults(self) -> Iterator[StorageFault]:
        """Yield what there is to try: each call on each place, its first, middle and last time, and each error."""
        groups: dict[tuple[str, str, bool], list[SystemCall]] = {}
        for call in self.calls:
            groups.setdefault((call.name, call.place, call.thread == 0), []).append(call)
        for calls in groups.values():
            chosen = dict.fromkeys((calls[0], calls[-1], calls[len(calls) // 2]))
            yield from (StorageFault(self.scenario.name, call, error) for call in chosen for error in call.errors)

    def attempt(self, fault: StorageFault) -> FaultOutcome:
        """Run the scenario with ``fault``, then once without, and judge both."""
        self.stage.restore()
        name, number = fault.call.name, fault.call.number
        if self._library:
            code = self._shortened(name, number)
        else:
            inject = f"inject={name}:error={fault.error}:when={number}"
            code = self._traced(name, "-e", inject, *self._only(fault.call.path))
        hit = [call.place for call in self._logged() if call.injected]
        stderr, records = self.stderr, self.stage.records()
        met = not hit or fault.call.place in hit  # under load other calls may come first: a folder's isn't tried again
        wrong = [*self._judge(code, stderr, retried=met and fault.error in (RETRIED, SHORT_COUNT))]
        stage = (records[-1]["error"] or {}).get("stage") if code and records else None
        wrong += self._run_again()
        return FaultOutcome(fault, code, _own_lines(stderr)[0] if _own_lines(stderr) else "", stage, hit, wrong)

    def _only(self, path: Path | None) -> list[str]:
        """Return the options by which strace sees calls on ``path`` alone, as the run may write it."""
        if path is None:
            return []
        return ["-P", str(path), "-P", str(path.relative_to(self.stage.folder))]

    def _judge(self, code: int, stderr: str, *, retried: bool) -> Iterator[str]:
        records = self.stage.records()
        if code not in CODES:
            yield f"exit code {code}"
        if retried and code:
            yield "a call that was interrupted, or did less than all, wasn't tried again"
        if "Traceback" in stderr:
            yield "a traceback"
        if len(_own_lines(stderr)) != bool(code) or len(stderr) > 4000:
            yield f"stderr: {stderr}"
        status = "failed" if code else "completed"
        if any(record["status"] != status for record in records):
            yield f"record: {[record['status'] for record in records]}"
        if not code and [record["outputs"] for record in records] != [self.answer]:
            yield f"another answer: {[record['outputs'] for record in records]}"
        yield from self._cache_faults()

    def _cache_faults(self) -> Iterator[str]:
        cache = self.stage.folder / OUTPUTS / "cache"
        for entry in housekeeping.entries(cache):
            damage = housekeeping.find_damage(entry)
            if damage:
                yield f"{entry.folder.relative_to(cache)}: {damage}"
        for path, damage in housekeeping.damaged_figures(cache).items():
            yield f"{path.name}: {damage}"

    def _run_again(self) -> Iterator[str]:
        before = len(self.stage.records())
        self._server.fork(self.stage.arguments, folder=self.stage.folder)
        code = self._server.go()
        new = self.stage.records()[before:]
        if code or [record["outputs"] for record in new] != [self.answer]:
            yield f"the next run: exit code {code}, {self.stderr}"

    def _logged(self) -> Iterator[SystemCall]:
        return (read_countable if self._library else read_calls)(self._log, self.stage.folder)

    def _shortened(self, name: str, number: int) -> int:
        """Run the scenario with the ``number``-th call of ``name`` doing half of it; return the exit code."""
        assert self._library is not None
        short = Shortening(self._library, self.stage.folder, name, number, self._log)
        self._server.fork(self.stage.arguments, folder=self.stage.folder, short=short)
        return self._server.go(seconds=_SECONDS)

    def _traced(self, names: str, *options: str) -> int:
        """Run the scenario under strace, which writes calls of ``names`` to the log; return the exit code."""
        process = self._server.fork(self.stage.arguments, folder=self.stage.folder)
        command = ["strace", "-f", "-y", "-s", "8", "-o", str(self._log), "-e", f"trace={names}", *options]
        tracer = subprocess.Popen([*command, "-p", str(process)], stderr=subprocess.PIPE, text=True)
        assert tracer.stderr is not None
        with tracer.stderr:
            said = next((line for line in tracer.stderr if "resolved" not in line), "")
            if "attached" not in said:
                raise OSError(f"strace can't be attached: {said}")
            code = self._server.go(seconds=_SECONDS)
            tracer.wait()
        return code


def _matters(call: SystemCall) -> bool:
    return call.place not in ("stdout", "stderr") and not call.place.startswith(("pipe:", "socket:"))


def _own_lines(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if not _WARNING.match(line)]


def rehearse(
    root: Path, server: ForkServer, names: Sequence[str], library: Path | None = None, *, described: Path | None = None
) -> dict[str, TracedScenario]:
    """Return the scenarios of these ``names``, ready for faults; folders of theirs are made in ``root``."""
    chosen = (each for each in SCENARIOS if each.name in names)
    return {each.name: TracedScenario(each, server, root, library, described=described) for each in chosen}


def compile_short_counts(root: Path) -> Path:
    """Return the library of ``short_counts.c``, made in ``root``; needs a C compiler."""
    library = root / "short_counts.so"
    source = Path(__file__).with_name("short_counts.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    return library


def choose(rehearsed: dict[str, TracedScenario], seed: int) -> list[StorageFault]:
    """Return all that there is to try, in an order by ``seed`` that has every call with every error, and every call on
    every kind of place, as early as can be.
    """
    faults = [fault for scenario in rehearsed.values() for fault in scenario.faults()]
    random.Random(seed).shuffle(faults)
    seen: Counter[tuple[str, ...]] = Counter()
    ranks: dict[StorageFault, int] = {}
    for fault in faults:
        kinds = (("error", fault.call.name, fault.error), ("place", fault.call.name, fault.call.kind))
        seen.update(kinds)
        ranks[fault] = max(seen[kind] for kind in kinds)
    return sorted(faults, key=ranks.__getitem__)
