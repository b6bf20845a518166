"""What all jobs of a sweep go by and is measured of the machine: measured once, before the first of them begins.

A job that measures while others start, or compute, finds a slower machine than there is, and every plan after it would
be made for that one.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from offstage.pipeline.config import check
from offstage.pipeline.errors import OffstageError
from offstage.pipeline.installed_stages import installed_stages
from offstage.pipeline.runner import load_stages
from offstage.pipeline.stage import Config

_WHERE = ("model", "hardware", "stages", "outputs")
"""The keys that say which checkpoint and machine a job is about."""


class MachinePreparation:
    """Has what the stages of a sweep's jobs measure of this machine measured, and kept in their cache.

    Jobs that are about one checkpoint and machine need one look. It is taken in a process that is forked for it where
    that can be: what a probe imports, and what an accelerator's driver holds, ends with it. What can't be measured, or
    is wrong with a job, the job says itself.
    """

    def __init__(self) -> None:
        self._done: set[str] = set()

    def prepare(self, configs: Iterable[Config]) -> None:
        """Look at the jobs with these ``configs``; an empty one is faulty."""
        new = self.unlike(configs)
        if new and "fork" in multiprocessing.get_all_start_methods():
            process = multiprocessing.get_context("fork").Process(target=_prepare, args=(new,))
            process.start()
            process.join()
        elif new:
            _prepare(new)

    def unlike(self, configs: Iterable[Config]) -> list[Config]:
        """Return one config of each checkpoint and machine that no job before was about."""
        about = {json.dumps([config.get(key) for key in _WHERE], default=str): config for config in configs if config}
        new = [config for words, config in about.items() if words not in self._done]
        self._done |= set(about)
        return new


def _prepare(configs: Sequence[Config]) -> None:
    for config in configs:
        with suppress(OffstageError, OSError):
            _prepare_for(config)


def _prepare_for(config: Config) -> None:
    """Have the stages of a job measure what they need; of a faulty one nothing is measured."""
    if list(check(config, list(installed_stages()))):
        return
    stages = load_stages(config)
    if any(fault for stage in stages for fault in stage.check(config)):
        return
    for stage in stages:
        if hasattr(stage, "prepare_machine"):
            stage.prepare_machine(config, Path(config["outputs"]) / "cache")
