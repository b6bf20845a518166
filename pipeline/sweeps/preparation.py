"""What all jobs of a sweep go by and is measured of the machine: measured once, before the first of them begins.

A job that measures while others start, or compute, finds a slower machine than there is, and every plan after it would
be made for that one.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, open_dict

from offstage.pipeline.config import check, refuse_sharing, resolve
from offstage.pipeline.errors import OffstageError
from offstage.pipeline.hydra_messages import COMPOSING_ERRORS
from offstage.pipeline.installed_stages import installed_stages
from offstage.pipeline.runner import load_stages
from offstage.pipeline.stage import Config

_WHERE = ("experiment", "model", "hardware", "stages", "outputs")
"""The keys that say which checkpoint and machine a job is about."""


class MachinePreparation:
    """Has what the stages of a sweep's jobs measure of this machine measured, and kept in their cache.

    Jobs that are about one checkpoint and machine need one look. It is taken in a process that is forked for it where
    that can be: what a probe imports, and what an accelerator's driver holds, ends with it. What can't be measured, or
    is wrong with a job, the job says itself.
    """

    def __init__(self) -> None:
        self._done: set[tuple[str, ...]] = set()

    def prepare(self, loader: Any, config: DictConfig, job_overrides: Sequence[Sequence[str]]) -> None:
        """Look at the jobs with these overrides; ``loader`` is Hydra's, which composes them over ``config``."""
        jobs = {
            tuple(each for each in overrides if each.lstrip("+~").startswith(_WHERE)) for overrides in job_overrides
        }
        new = sorted(jobs - self._done)
        self._done |= jobs
        if new and "fork" in multiprocessing.get_all_start_methods():
            process = multiprocessing.get_context("fork").Process(target=_prepare, args=(loader, config, new))
            process.start()
            process.join()
        elif new:
            _prepare(loader, config, new)


def _prepare(loader: Any, config: DictConfig, jobs: Sequence[Sequence[str]]) -> None:
    for overrides in jobs:
        with suppress(OffstageError, OSError, *COMPOSING_ERRORS):
            _prepare_for(compose_job(loader, config, overrides))


def compose_job(loader: Any, config: DictConfig, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the resolved config of the job with these overrides; ``loader`` composes them over ``config``."""
    composed = loader.load_sweep_config(config, list(overrides))
    refuse_sharing(composed)
    with open_dict(composed):
        del composed["hydra"]  # a job's own config has no such node, and half of it means nothing before a job
    return resolve(composed)


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
