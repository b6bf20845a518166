"""The table of jobs: one column a fact, each in one unit, for the terminal and the page alike.

Why a job didn't complete isn't in it: that is told beside it, once for all jobs with the same reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from offstage.pipeline.report.differences import ABSENT, Spread
from offstage.pipeline.report.links import LINK_FIGURES, linked_devices
from offstage.pipeline.report.noise import Noise, told_samples
from offstage.pipeline.report.placements import in_tier_order
from offstage.pipeline.report.quantities import MISSING, Kind, listed, scale_for, shorten
from offstage.pipeline.report.records import Bytes, Number, Run
from offstage.pipeline.report.run_folders import Job
from offstage.pipeline.report.speed import (
    BOUND,
    DISK,
    FIRST_TOKEN,
    HIT_RATE,
    PREDICTED_BOUND,
    PREDICTED_SECONDS,
    PREDICTED_STREAMED,
    RATE,
    SECONDS,
    STALL_SHARE,
    STALLED,
    STREAMED,
    STREAMING,
    bound_seconds,
)

UNLIMITED = "unlimited"
_UNLIMITED_BYTES = 2.0**63
"""What a budget without a limit is sorted by: more than any that a record has."""
BETWEEN_TOKENS = "time_between_tokens_seconds_p90"
PERPLEXITY = "perplexity"
BITS = "bits_per_byte"
SCORED = "scored_tokens_per_second"
STREAMED_FORWARD = "streamed_bytes_per_forward"
PASSES = "passes"
TOKENS_A_PASS = "tokens_per_pass"
SPECULATION = "speculation"
ACCEPTANCE = "draft_acceptance"
HOST_LAYERS = "host_layers"
_LONGEST = 600
"""So many characters of a cell are kept: a prompt may have thousands, and the table has it once for each job."""
_OF_CHECKPOINT = ("model.kind", "model.path", "model._target_")


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its ``title``, the ``unit`` of its numbers (empty for text), and a cell for every job.

    ``values`` are the numbers that the cells tell, by which jobs are sorted. Jobs can be picked by the words of a
    column that ``sets_apart``.
    """

    title: str
    unit: str
    cells: tuple[str, ...]
    numeric: bool = False
    values: tuple[Number | None, ...] = ()
    sets_apart: bool = False


def job_table(
    jobs: Sequence[Job], differences: Sequence[Spread], within: Noise, *, checkpoints: Mapping[str, str] | None = None
) -> tuple[Column, ...]:
    """Return the columns of the table of jobs; one that has nothing to say about any job is left out.

    ``within`` says which jobs can't be told apart; ``checkpoints`` has the name of each job's, where there are several.
    """
    budgets = _budgets(jobs)
    shown = {f"max_memory.{column.title.removeprefix('budget ')}" for column in budgets}
    shown |= set(_OF_CHECKPOINT if checkpoints else ())
    columns = [
        Column("job", "", tuple(job.name for job in jobs)),
        Column("status", "", tuple(_status(job.run) for job in jobs), sets_apart=True),
        *(
            [Column("checkpoint", "", tuple(map(checkpoints.__getitem__, _names(jobs))), sets_apart=True)]
            if checkpoints
            else []
        ),
        *(_setting(jobs, entry) for entry in differences if entry.key not in shown),
        *budgets,
        _measured(jobs, "memory cap", "bytes", lambda run: run.cap_bytes),
        _measured(jobs, "first token", "seconds", lambda run: run.metric(FIRST_TOKEN)),
        _measured(jobs, "time a token", "seconds", lambda run: run.metric(SECONDS)),
        _measured(jobs, "least", "seconds", lambda run: min(_times(run), default=None)),
        _measured(jobs, "largest", "seconds", lambda run: max(_times(run), default=None)),
        _measured(jobs, "between tokens, p90", "seconds", lambda run: run.metric(BETWEEN_TOKENS)),
        Column("samples", "", tuple(told_samples(job) or MISSING for job in jobs)),
        *_noise(jobs, within),
        _measured(jobs, "predicted", "seconds", lambda run: run.metric(PREDICTED_SECONDS)),
        _measured(jobs, "bound", "seconds", bound_seconds),
        _measured(jobs, "speed", "rate", lambda run: run.metric(RATE), unit="tokens/s"),
        _measured(jobs, "perplexity", "number", lambda run: run.metric(PERPLEXITY)),
        _measured(jobs, "bits a byte", "number", lambda run: run.metric(BITS)),
        _measured(jobs, "scored", "rate", lambda run: run.metric(SCORED), unit="tokens/s"),
        _measured(jobs, "streamed a token", "bytes", lambda run: run.metric(STREAMED)),
        *_predicted_bytes(jobs),
        _measured(jobs, "experts in slots", "share", lambda run: run.metric(HIT_RATE)),
        _measured(jobs, "layers on the host", "count", lambda run: run.metric(HOST_LAYERS)),
        _measured(jobs, "passes", "count", lambda run: run.metric(PASSES)),
        _words(jobs, "drafts judged", SPECULATION),
        _measured(jobs, "drafts accepted", "share", lambda run: run.metric(ACCEPTANCE)),
        _measured(jobs, "tokens a pass", "rate", _tokens_a_pass),
        _measured(jobs, "streamed a forward", "bytes", lambda run: run.metric(STREAMED_FORWARD)),
        _measured(jobs, "streaming", "bytes", lambda run: run.metric(STREAMING), per="/s"),
        _measured(jobs, "stalled a token", "seconds", lambda run: run.metric(STALLED)),
        _measured(jobs, "stalled", "share", lambda run: run.metric(STALL_SHARE)),
        *_links(jobs),
        _words(jobs, "bound by", BOUND),
        _words(jobs, "predicted bound", PREDICTED_BOUND),
        *_peaks(jobs),
    ]
    told = [column for column in columns if set(column.cells) - {MISSING}]
    return tuple(replace(column, cells=tuple(shorten(cell, _LONGEST) for cell in column.cells)) for column in told)


def _names(jobs: Sequence[Job]) -> list[str]:
    return [job.name for job in jobs]


def _words(jobs: Sequence[Job], title: str, metric: str) -> Column:
    return Column(title, "", tuple(job.run.words.get(metric) or MISSING for job in jobs), sets_apart=True)


def _tokens_a_pass(run: Run) -> Number | None:
    """Return how many tokens a pass of the model gave, where forwards share passes or judge drafts; None elsewhere."""
    passes, noted = run.metric(PASSES), run.metric(TOKENS_A_PASS)
    if noted is not None:
        return noted
    return sum(len(answer.token_ids) for answer in run.answers) / passes if passes else None


def _times(run: Run) -> list[Number]:
    """Return the samples of the seconds of a token, none where there aren't several."""
    times = [sample.token_seconds for sample in run.counting if sample.token_seconds is not None]
    return times if len(times) > 1 else []


def _noise(jobs: Sequence[Job], within: Noise) -> list[Column]:
    """Return the column that says from which others a job can't be told apart, none where nothing was compared."""
    if not within.pairs:
        return []
    cells = [listed(within.like[job.name]) or "none" if job.name in within.like else MISSING for job in jobs]
    return [Column("within the noise of", "", tuple(cells))]


def devices(jobs: Sequence[Job], held: Callable[[Run], Bytes]) -> list[str]:
    """Return every device but the disk that ``held`` has a number for, in the order of the tiers."""
    return [device for device in in_tier_order(name for job in jobs for name in held(job.run)) if device != DISK]


def _predicted_bytes(jobs: Sequence[Job]) -> list[Column]:
    """Return the column of the bytes a token that the plans predict, none where each came true as it was told."""
    column = _measured(jobs, "predicted to stream", "bytes", lambda run: run.metric(PREDICTED_STREAMED))
    return [] if all(job.run.metric(PREDICTED_STREAMED) == job.run.metric(STREAMED) for job in jobs) else [column]


def _setting(jobs: Sequence[Job], entry: Spread) -> Column:
    cells = {name: MISSING if value == ABSENT else value for value, names in entry.values for name in names}
    return Column(entry.key, "", tuple(cells.get(job.name, MISSING) for job in jobs), sets_apart=True)


def _budgets(jobs: Sequence[Job]) -> list[Column]:
    """Return a column a device. A job that was refused has no budget in its record, so its config's word stands."""
    columns = []
    for device in devices(jobs, lambda run: run.budget):
        values = [_budget(job.run, device) for job in jobs]
        scale = scale_for([None if value == _UNLIMITED_BYTES else value for value in values], "bytes")
        cells = [
            _given(job.run, device)
            if value is None
            else UNLIMITED
            if value == _UNLIMITED_BYTES
            else scale.number(value)
            for job, value in zip(jobs, values, strict=True)
        ]
        columns.append(Column(f"budget {device}", scale.unit, tuple(cells), numeric=True, values=tuple(values)))
    return columns


def _budget(run: Run, device: str) -> Number | None:
    """Return the bytes of weights that ``device`` may hold, ``_UNLIMITED_BYTES`` without a limit, None if unknown."""
    if device not in run.budget:
        return None
    budget = run.budget[device]
    return _UNLIMITED_BYTES if budget is None else budget


def _given(run: Run, device: str) -> str:
    asked = run.config.get("max_memory")
    return str(asked.get(device, MISSING)) if isinstance(asked, dict) else MISSING


def _peaks(jobs: Sequence[Job]) -> list[Column]:
    every = devices(jobs, lambda run: run.measured)
    return [_measured(jobs, f"peak {device}", "bytes", partial(_peak, device)) for device in every]


def _links(jobs: Sequence[Job]) -> list[Column]:
    """Return a column for each figure of each link, where there are several."""
    figures = [
        (f"to {device}, {figure.title}", figure.kind, figure.name(device))
        for device in linked_devices(name for job in jobs for name in job.run.metrics)
        for figure in LINK_FIGURES
    ]
    return [_measured(jobs, title, kind, partial(_metric, name)) for title, kind, name in figures]


def _metric(name: str, run: Run) -> Number | None:
    return run.metric(name)


def _peak(device: str, run: Run) -> Number | None:
    return run.measured.get(device)


def _measured(
    jobs: Sequence[Job], title: str, kind: Kind, value: Callable[[Run], Number | None], *, unit: str = "", per: str = ""
) -> Column:
    """Return a column of numbers: their ``unit`` is given, or the one that suits them, ``per`` something."""
    values = [value(job.run) for job in jobs]
    scale = scale_for(values, kind)
    return Column(title, unit or scale.unit + per, tuple(map(scale.number, values)), numeric=True, values=tuple(values))


def _status(run: Run) -> str:
    """Return the status, and whether the figures are an earlier run's, or of accelerators that aren't there.

    A cap that was asked for and not tested is said too.
    """
    hardware = run.config.get("hardware")
    simulated = isinstance(hardware, dict) and bool(hardware.get("devices"))
    cached = run.status == "completed" and run.provenance.is_cached
    untested = run.status == "completed" and bool(run.cap_untested)
    return ", ".join([run.status, *["cached"] * cached, *["simulated"] * simulated, *["no cap tested"] * untested])
