"""What the searches came to whose jobs a report shows: the best job of each, its number and its limits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from offstage.pipeline.errors import ConfigError
from offstage.pipeline.objective import Objective, objective_of
from offstage.pipeline.regular_files import read_object
from offstage.pipeline.report.quantities import tell
from offstage.pipeline.report.run_folders import Job
from offstage.pipeline.run_schema import Run

RESULTS = "optimization_results.yaml"
"""The file in a sweep's folder that says what its search came to, by the name that hydra-optuna-sweeper gives it. It
holds JSON, which is YAML too."""


def search_facts(jobs: Sequence[Job]) -> Iterator[tuple[str, str, str]]:
    """Yield what each search among ``jobs`` came to: a name, the best number, and of which job within which limits."""
    for folder in dict.fromkeys(job.run.folder.parent for job in jobs):
        results = read_object(folder / RESULTS)
        if not results:
            continue
        extent = f"{results.get('jobs')} jobs of {results.get('trials')} trials"
        best = next((job for job in jobs if job.run.folder == folder / str(results.get("best_job"))), None)
        objective = _objective(best.run) if best is not None else None
        if best is None or objective is None:
            yield ("search", "no answer", f"none of {extent} completed within the objective's limits")
        else:
            why = f"{best.name}, best of {extent}: {tell_objective(objective)}"
            yield ("search", tell(objective.value, objective.unit), why)


def tell_objective(objective: Objective) -> str:
    """Return in words what a run came to, and its limits."""
    words = [f"{objective.name} {tell(objective.value, objective.unit)}"]
    for limit in objective.limits:
        side, amount = "at most" if limit.is_most else "at least", tell(limit.limit, limit.unit)
        words.append(f"{limit.name} {tell(limit.value, limit.unit)} ({side} {amount})")
    return ", ".join(words)


def _objective(run: Run) -> Objective | None:
    try:
        return objective_of(run)
    except (ConfigError, TypeError):
        return None
