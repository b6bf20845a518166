"""Which differences between jobs are within the noise: their repeats held against each other, pair by pair.

Times have long tails and no normal distribution, and there are few of them. So it is ranks that are compared: the
two-sided rank-sum test of Wilcoxon (1945) and of Mann and Whitney (1947), SciPy's: exact for few repeats without ties,
by the normal approximation else. Repeats of one job share a process, and where in memory it lies: what differs between
processes alone isn't in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb

from offstage.pipeline.report.run_folders import Job
from offstage.pipeline.run_schema import Number

LEVEL = 0.05
"""Jobs differ where chance alone would set repeats so far apart less often than this."""
FIRST_TOKEN, SECONDS = "time_to_first_token_seconds", "decode_seconds_per_token"
"""The metrics that a run's repeats are of."""
MOST_JOBS = 40
"""So many jobs are held against each other: of more nobody reads the pairs."""


@dataclass(frozen=True, slots=True)
class Noise:
    """What can be said of the differences between the jobs that have several repeats.

    ``like`` has, for each of these jobs, those from which it can't be told apart. ``pairs`` were looked at; for
    ``undecided`` of them there are too few repeats to tell any difference.
    """

    like: dict[str, tuple[str, ...]]
    pairs: int
    undecided: int

    @property
    def within(self) -> int:
        """How many pairs are within the noise."""
        return sum(map(len, self.like.values())) // 2

    def describe(self) -> str:
        """Return it in a sentence, empty where nothing was compared."""
        if not self.pairs:
            return ""
        apart = self.pairs - self.within
        few = f" {self.undecided:,} of them have too few repeats to tell: four each can." if self.undecided else ""
        return (
            f"Of {self.pairs:,} pairs of jobs {apart:,} differ in the time of a token by a rank test"
            f" (p < {LEVEL} for each pair); {self.within:,} are within the noise.{few}"
        )


def noise(jobs: Sequence[Job]) -> Noise:
    """Return which of ``jobs`` can be told apart by the seconds of a token; those of one model are compared.

    Jobs that were served the same repeats are one measurement told twice, and no pair.
    """
    times = {job.name: token_times(job) for job in jobs}
    several = [job for job in jobs if len(times[job.name]) > 1][:MOST_JOBS]
    like: dict[str, list[str]] = {job.name: [] for job in several}
    pairs = undecided = 0
    for one, other in combinations(several, 2):
        first, second = times[one.name], times[other.name]
        if first == second or one.run.config.get("model") != other.run.config.get("model"):
            continue
        pairs += 1
        undecided += 2 / comb(len(first) + len(second), len(first)) >= LEVEL
        if rank_test(first, second) >= LEVEL:
            like[one.name].append(other.name)
            like[other.name].append(one.name)
    return Noise({name: tuple(names) for name, names in like.items()}, pairs, undecided)


def token_times(job: Job) -> list[Number]:
    """Return the seconds of a token in each repeat that counts."""
    return [time for repeat in job.run.counting if (time := repeat.metric(SECONDS)) is not None]


def rank_test(one: Sequence[Number], other: Sequence[Number]) -> float:
    """Return how often chance alone would set two repeats of one distribution as far apart as ``one`` and ``other``."""
    from scipy.stats import mannwhitneyu  # takes longer to import than all else of a report

    return 1.0 if len({*one, *other}) == 1 else float(mannwhitneyu(one, other).pvalue)


def told_repeats(job: Job) -> str:
    """Return how many repeats a job's metrics are made of, and how many are earlier ones, or were disturbed.

    Empty where a single one says nothing but itself.
    """
    provenance = job.run.provenance
    parts = [f"{provenance.earlier} earlier"] * bool(provenance.earlier) + [f"{provenance.contended} contended"] * bool(
        provenance.contended
    )
    return (
        ", ".join([str(provenance.repeats), *parts]) if job.run.counting and (provenance.repeats > 1 or parts) else ""
    )
