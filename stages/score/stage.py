"""The stage score: a dispatched model and texts → log-likelihoods and perplexity."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offstage.pipeline.errors import Fault
from offstage.pipeline.metrics import Metric
from offstage.pipeline.stage import Artifact, Config, Context
from offstage.pipeline.typed_config import PATHS, STANDARD_INPUT, absolute, read
from offstage.stages.inference.declared_metrics import FORWARDS, LOADING, REPEATS, WHOLE_RUN, earlier
from offstage.stages.inference.inputs import chosen_number, gather_model
from offstage.stages.inference.measured_stage import MeasuredStage
from offstage.stages.inference.progress import earlier_told
from offstage.stages.inputs.texts import ScoreOptions, check_texts, read_scored_texts
from offstage.stages.plan.request.geometry import read_geometry
from offstage.stages.score.inputs import SCORES, ScoreInputs
from offstage.stages.score.metrics import told_text

if TYPE_CHECKING:
    from offstage.stages.score.scoring import ScoringSession

FILE_NAME = "score.json"
_SHOWN = 20
"""How many texts are shown on the screen."""
_WIDTH = 48


@dataclass(frozen=True, slots=True)
class ScoreConfig:
    """The texts, and how they are cut into windows and batches."""

    score: ScoreOptions = field(
        default_factory=ScoreOptions,
        metadata={
            PATHS: {"texts_file": absolute, "text_file": absolute},
            STANDARD_INPUT: {"texts_file": "texts"},
        },
    )


class ScoreStage(MeasuredStage[ScoreInputs]):
    """Leaves ``score.json``: the log-likelihood of every scored token, sums, perplexity. Its live half scores again.

    A build that was killed is gone on with: the windows that it had scored are in ``scores.jsonl``.
    """

    name = "score"
    doing = "scores the texts"
    version = 5
    needs: tuple[str, ...] = ("dispatch",)
    config_class = ScoreConfig
    resumes = (SCORES,)
    file_name = FILE_NAME
    results = "scores"
    seconds = "score_seconds"
    metrics = (
        *LOADING,
        Metric("perplexity", "number", "perplexity", leads=True),
        Metric("bits_per_byte", "number", "bits a byte"),
        Metric("log_likelihood", "number"),
        Metric("scored_tokens", "count"),
        Metric(seconds, "seconds", "scoring"),
        Metric("scored_tokens_per_second", "tokens/s", "scored"),
        *FORWARDS,
        *WHOLE_RUN,
        *REPEATS,
        earlier("windows"),
    )

    def check(self, config: Config) -> Iterable[Fault]:
        """Yield what is wrong with the texts and the windows, as far as the model needn't be known."""
        yield from check_texts(read(ScoreConfig, config).score)

    def examine(self, config: Config) -> Iterable[Fault]:
        """Yield why the model can't score, and what is wrong with the texts for it."""
        from offstage.stages.score.served import check_served

        options = read(ScoreConfig, config).score
        if not list(check_texts(options)):
            yield from check_served(options, config["model"])

    def gather(self, context: Context) -> ScoreInputs:
        """Return the model's identity and placement, the texts and their windows."""
        options = read(ScoreConfig, context.config).score
        texts, (window, stride) = (
            read_scored_texts(options),
            options.windows(read_geometry(context.config["model"]).context),
        )
        return ScoreInputs(
            texts=list(texts.values()),
            names=list(texts),
            window=window,
            stride=stride,
            batch_size=1 if options.exact else chosen_number("batch_size", options.batch_size, context) or 1,
            **gather_model(context),
        )

    def session(self, inputs: ScoreInputs, context: Context) -> ScoringSession:
        """Return the model and the windows, ready to be scored."""
        from offstage.stages.score.scoring import ScoringSession

        return ScoringSession(inputs, context)

    def outputs(self, data: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """Return the scores of each text."""
        return [told_text(text) for text in data["texts"]]

    def screen(self, data: Mapping[str, Any], artifact: Artifact) -> str:
        """Return a table of the texts."""
        return "\n".join(_screen(data["texts"], artifact.path(SCORES)))

    def describe(self, outputs: Sequence[Mapping[str, Any]], metrics: Mapping[str, Any]) -> str:
        """Return the line of the screen: the perplexity, and how fast the tokens were scored."""
        rate = metrics["scored_tokens_per_second"]
        line = f"perplexity {_number(metrics['perplexity'])} over {metrics['scored_tokens']} tokens"
        return line + (f", {rate:.1f} a second" if rate else "") + earlier_told(metrics, "windows")


def _screen(texts: Sequence[Mapping[str, Any]], file: Path) -> Iterator[str]:
    """Yield a table of ``texts``, every token of which is in ``file``."""
    yield f"{'text':<{_WIDTH}}  {'tokens':>8}  {'log-likelihood':>14}  {'perplexity':>10}  greedy"
    for text in texts[:_SHOWN]:
        cells = f"{text['tokens']:>8}  {_number(text['log_likelihood']):>14}  {_number(text['perplexity']):>10}"
        yield f"{_line(text):<{_WIDTH}}  {cells}  {'yes' if text['is_greedy'] else 'no'}"
    more = f"… and {len(texts) - _SHOWN} more; " if len(texts) > _SHOWN else ""
    yield f"{more}token by token in {file}"


def _line(text: Mapping[str, Any]) -> str:
    """Return the text in one line of bearable length, the context of a continuation before an arrow."""
    if text["name"].endswith("text_file"):
        return "the file"
    parts = [part for part in (text["context"], text["text"]) if part is not None]
    line = " → ".join(" ".join(part.split()) if isinstance(part, str) else str(part) for part in parts)
    return line if len(line) <= _WIDTH else f"{line[: _WIDTH - 1]}…"


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"
