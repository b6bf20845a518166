"""One scoring: texts in, log-likelihoods out, measured as it goes."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from tqdm import tqdm

from offstage.pipeline.stage import Context
from offstage.stages.checkpoints.model_source import ModelSource
from offstage.stages.checkpoints.tokenizers import load_tokenizer
from offstage.stages.inference.cost import ForwardCost, Metrics
from offstage.stages.inference.progress import Progress, Row
from offstage.stages.inference.session import ModelSession, PassResult
from offstage.stages.inference.tokens import check_words
from offstage.stages.inputs.batches import by_length
from offstage.stages.inputs.texts import ScoredText
from offstage.stages.score.inputs import SCORES, ScoreInputs
from offstage.stages.score.likelihoods import TokenScores, has_encoder, require_causal, score_windows
from offstage.stages.score.metrics import TextScore, told_text
from offstage.stages.score.windows import Window, cut, encode


class ScoringSession(ModelSession[ScoreInputs]):
    """The placed model and the windows that it is to score.

    The artifact has one mapping a text, with the log-likelihood of each of its scored tokens.
    """

    task, units, results_file = "score", "windows", SCORES

    def __init__(self, inputs: ScoreInputs, context: Context) -> None:
        super().__init__(inputs, context)
        tokenizer = load_tokenizer(ModelSource.of(inputs.model))
        model = self.dispatched.model
        require_causal(model, self.dispatched.device)
        halves = has_encoder(model)
        named = zip(inputs.names, inputs.texts, strict=True)
        encoded = [encode(name, text, tokenizer, has_encoder=halves) for name, text in named]
        check_words(model, [[*text.ids, *text.source] for text in encoded], key="score")
        self._windows = list(cut(encoded, window=inputs.window, stride=inputs.stride))
        lengths = [max(len(window.ids), len(window.source)) for window in self._windows]
        has_mask = getattr(model, "config", None) is not None  # of a model that isn't transformers' none is known
        self._batches = by_length(lengths, size=inputs.batch_size, padded=has_mask)

    @property
    def count(self) -> int:
        """How many windows there are."""
        return len(self._windows)

    def answer(self, progress: Progress, title: str) -> PassResult:
        """Score every window, in batches, those apart that ``progress`` has."""
        cost = self._score(progress, title)
        texts = _texts(self.inputs, progress.settle())
        sums = TextScore.together([TextScore.of(text["log_likelihoods"], text["bytes"]) for text in texts]).metrics()
        timed: Metrics = {"score_seconds": cost.seconds, "scored_tokens_per_second": cost.results_per_second}
        return PassResult(
            outputs=[told_text(text) for text in texts],
            metrics={**timed, **cost.metrics()},
            content={"texts": texts},
            sums={"scored_tokens": sums.pop("tokens"), **sums},
        )

    def _score(self, progress: Progress, title: str) -> ForwardCost:
        left = {number: batch for number, batch in enumerate(self._batches) if number not in progress.done}
        cost = ForwardCost(self.dispatched.streamer.traffic)
        with tqdm(total=len(self._windows), desc=title, unit="window", disable=None, leave=False) as bar:
            bar.update(len(self._windows) - sum(map(len, left.values())))
            for number, batch in left.items():
                chosen = [self._windows[index] for index in batch]
                began = time.perf_counter()
                with self.dispatched.streamer.passes.alone():
                    scores = score_windows(self.dispatched.model, chosen, self.dispatched.device)
                cost.add(time.perf_counter() - began, results=sum(len(score.values) for score in scores))
                progress.add([_row(number, len(batch), *pair) for pair in zip(chosen, scores, strict=True)])
                bar.update(len(batch))
        return cost


def _row(batch: int, rows: int, window: Window, scores: TokenScores) -> Row:
    """Return what is told of a window: ``begin`` to ``end`` of its text, of which ``token_ids`` were scored."""
    return {
        "index": window.index,
        "batch": batch,
        "rows": rows,
        "text": window.text,
        "begin": window.begin,
        "end": window.end,
        "token_ids": list(window.scored),
        "log_likelihoods": scores.values,
        "greedy": scores.greedy,
    }


def _texts(inputs: ScoreInputs, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return what is told of each text, all its windows together."""
    of_text: list[list[Row]] = [[] for _ in inputs.texts]
    for row in rows:
        of_text[row["text"]].append(row)
    named = zip(inputs.names, inputs.texts, of_text, strict=True)
    return [_text(name, text, windows) for name, text, windows in named]


def _text(name: str, text: ScoredText, rows: Sequence[Row]) -> dict[str, Any]:
    joined: Mapping[str, list[Any]] = {
        key: [value for row in rows for value in row[key]] for key in ("token_ids", "log_likelihoods", "greedy")
    }
    size = len(text.content.encode()) if isinstance(text.content, str) else None
    digest = sha256()
    for row in rows:
        digest.update(json.dumps([row["token_ids"], row["log_likelihoods"]]).encode())
    return {
        "name": name,
        "context": text.context,
        "text": text.content,
        **TextScore.of(joined["log_likelihoods"], size).metrics(),
        "is_greedy": all(joined["greedy"]),
        "bytes": size,
        "windows": [[row["begin"], row["end"]] for row in rows],
        "batches": [row["batch"] for row in rows],
        "text_sha256": sha256(text.content.encode()).hexdigest() if isinstance(text.content, str) else None,
        "scores_sha256": digest.hexdigest(),
        **joined,
    }
