"""lm-eval's tasks on a model that streams: ``python -m offstage.lm_eval --model offstage …`` is lm-eval's own command.

lm-eval knows models of other packages once a module that registers them was imported: from Python ``import
offstage.lm_eval`` is that, and run as a module this is lm-eval's command with the name ``offstage`` in its registry.
How text becomes tokens, and answers become text, is its ``hf`` model's code; only what the model is asked goes another
way, so that numbers are the same.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, ClassVar

from offstage.pipeline.command_exit import last_resort
from offstage.pipeline.errors import ConfigError

try:
    from lm_eval import utils
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.utils import (
        handle_stop_sequences,
        normalize_gen_kwargs,
        postprocess_generated_text,
        resolve_max_length,
    )
except ModuleNotFoundError as error:
    refusal = ConfigError(
        f"offstage.lm_eval needs {error.name}, which isn't installed: pip install 'offstage-pipeline[lm-eval]'"
    )
    if __name__ != "__main__":
        raise refusal from error
    sys.stderr.write(f"{refusal}\n")
    sys.exit(refusal.exit_code)

import torch

from offstage.stages.checkpoints.model_source import ModelSource, located
from offstage.stages.checkpoints.tokenizers import load_tokenizer
from offstage.stages.dispatch.loaded_model import LoadedModel, load
from offstage.stages.empty_init.identity import MODEL_KEYS
from offstage.stages.empty_init.model import read_class
from offstage.stages.inputs.texts import LONGEST_WINDOW

_log = logging.getLogger("lm_eval.offstage")
"""Below lm-eval's own logger, which alone its command shows."""

_OF_TOKENS = (
    "add_bos_token", "backend", "chat_template_args", "enable_thinking", "prefix_token_id", "think_end_token",
    "truncation",
)  # fmt: skip
"""What of the arguments of ``hf`` says how text becomes tokens and answers become text: these are passed on to it."""

_ELSEWHERE = {
    "parallelize": "weights are placed by the plan; give max_memory_0= and max_memory_cpu=",
    "max_cpu_memory": "give max_memory_cpu=",
    "max_memory_per_gpu": "give max_memory_0=, max_memory_1=, …",
    "peft": "give adapter=FOLDER",
    "gguf_file": "give pretrained=FILE.gguf",
}
"""Arguments of ``hf`` that say what others say here."""

Request = tuple[tuple[str, str] | None, list[int], list[int]]
"""What lm-eval asks for in tokens: its own words for it, the context and what continues it."""


@register_model("offstage")
class OffstageLM(HFLM):  # type: ignore[misc]
    """The model ``offstage`` of lm-eval.

    ``pretrained`` is a checkpoint's folder or Hub id. ``max_memory_cpu``, ``max_memory_0``, … are the budgets, and
    other arguments are the options of ``offstage.load`` by their own names, a dot before a key that is nested
    (``storage.io=direct``). Windows are of ``max_length`` tokens: those of the model's context, at most 2048.

    ``batch_size`` requests for likelihoods are computed together, as many as fit where it is ``auto``. Answers that are
    generated are those that each prompt has alone: where weights stream, ``batch_size`` of them go in lockstep, or as
    many as pay where it is 1 or ``auto``. ``max_batch_size`` and ``device``, which lm-eval's command always gives, say
    nothing here: the plan says how many fit, and where each module computes.
    """

    loaded: LoadedModel
    AUTO_MODEL_CLASS: ClassVar[Any] = None

    def __init__(
        self,
        pretrained: str,
        *,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        max_length: int | None = None,
        device: str | None = None,
        **given: Any,
    ) -> None:
        refused = next((name for name in given if name in _ELSEWHERE and given[name] not in (None, False)), None)
        if refused is not None:
            raise ConfigError(f"{refused}: {given[refused]!r} is an argument of lm-eval's hf; {_ELSEWHERE[refused]}")
        own = {name: given.pop(name) for name in _OF_TOKENS if name in given}
        options = nested({name: value for name, value in given.items() if name not in _ELSEWHERE})
        together = str(batch_size).partition(":")[0]
        sizes = {"max_length": max_length or _longest(pretrained, options)}
        sizes |= {"batch_size": 1 if together == "auto" else int(together)}
        self.loaded = load(pretrained, **{"asks": "score", **sizes, **options})
        tokenizer = self.loaded.tokenizer
        if tokenizer is None:
            raise ConfigError(f"pretrained: {pretrained!r} has no tokenizer; give tokenizer=FOLDER")
        own |= {"batch_size": together, "max_length": sizes["max_length"]}
        super().__init__(self.loaded.model, tokenizer=tokenizer, **own)
        self.pretrained, self.revision = pretrained, options.get("revision", "main")
        _log.info("%r", self.loaded)
        if self.loaded.plan.serving and together == "1":
            _log.info("weights stream for each request for likelihoods: --batch_size auto has many share a pass")

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation after its context, and whether it is the likeliest."""
        if not requests:
            return []
        texts = [self._text(context, continuation) for _, context, continuation in requests]
        scores = self.loaded.score(texts, window=self.max_length, batch_size=self.batch_size)
        answers = [
            (-float("inf") if score.log_likelihood is None else score.log_likelihood, score.is_greedy)
            for score in scores
        ]
        for (words, _, _), answer in zip(requests, answers, strict=True):
            if words is not None:
                self.cache_hook.add_partial("loglikelihood", words, answer)
        return answers

    def _text(self, context: list[int], continuation: list[int]) -> dict[str, list[int]]:
        """Return a text to score, of its context what the model has positions for."""
        count, room = len(continuation), self.max_length + (self.backend == "causal")
        kept = [*context, *continuation][-room:][:-count] if self.backend == "causal" else context[-room:]
        if left := len(context) - len(kept):
            _log.warning("the first %d tokens of a context are left out: the model sees %d", left, self.max_length)
        return {"context": kept, "continuation": continuation}

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each whole text, all of its windows together."""
        windows: list[tuple[int, Request]] = []
        for place, request in enumerate(requests):
            rolling = utils.get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, context_len=1
            )
            windows += [(place, (None, *utils.make_disjoint_window(window))) for window in rolling]
        sums = [0.0] * len(requests)
        scores = self._loglikelihood_tokens([window for _, window in windows])
        for (place, _), (likelihood, _) in zip(windows, scores, strict=True):
            sums[place] += likelihood
        for request, likelihood in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, likelihood)
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return what the model answers to each prompt, up to the first of its stop sequences."""
        texts = [""] * len(requests)

        def options(place: int) -> str:
            return json.dumps(requests[place].args[1], sort_keys=True)

        for _, group in groupby(sorted(range(len(requests)), key=options), key=options):
            places = list(group)
            answers = self._generate([requests[place].args[0] for place in places], requests[places[0]].args[1])
            for place, answer in zip(places, answers, strict=True):
                self.cache_hook.add_partial("generate_until", requests[place].args, answer)
                texts[place] = answer
        return texts

    def _generate(self, prompts: Sequence[str], given: Mapping[str, Any]) -> list[str]:
        """Return the answers to ``prompts`` under the options ``given`` in lm-eval's words."""
        options = normalize_gen_kwargs(dict(given), self.max_gen_toks)
        end = self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        stops = handle_stop_sequences(options.pop("until", None), eos=end)
        new, causal = options.pop("max_gen_toks"), self.backend == "causal"
        room = self.max_length - new if causal else self.max_length
        if room < 1:
            raise ConfigError(f"max_gen_toks: {new} leave no room for a prompt in {self.max_length}; give max_length=")
        if not options["do_sample"]:
            options.pop("temperature", None)
        encoded = [self._encoded(prompt, room) for prompt in prompts]
        answers = self.loaded.generate(
            encoded, max_new_tokens=new, seed=torch.initial_seed() % 2**32, chat=False,
            stop_strings=[stop for stop in stops if stop], lockstep=self._together, **options,
        )  # fmt: skip
        return [self._answer(answer.token_ids, stops) for answer in answers]

    @property
    def _together(self) -> int | None:
        """How many prompts go in lockstep; null: as many as pay."""
        return self.batch_size if self.batch_size not in (1, "auto") and self.loaded.plan.serving else None

    def _encoded(self, prompt: str, room: int) -> list[int]:
        encoded, _ = self.tok_batch_encode([prompt], left_truncate_len=room, truncation=self.truncation)
        ids: list[int] = encoded[0].tolist()
        return ids or [self.prefix_token_id]

    def _answer(self, ids: Sequence[int], stops: list[str]) -> str:
        """Return the text of ``ids`` as ``hf`` makes it: without what was thought before it, up to a stop sequence."""
        end = self.think_end_token
        kept, thought = list(ids), isinstance(end, int) and end in ids
        if thought:
            kept = kept[len(kept) - kept[::-1].index(end) :]
        text = self.tok_decode(kept)
        words = end if isinstance(end, str) else None
        return str(postprocess_generated_text(text.lstrip() if thought else text, stop=stops, think_end_token=words))


def nested(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments as ``load`` takes them: ``storage.io`` is a key inside ``storage``, and ``max_memory_cpu`` one
    inside ``max_memory``.

    >>> nested({"max_memory_cpu": "8GB", "max_memory_0": "2GB", "storage.io": "direct", "dtype": "bfloat16"})
    {'max_memory': {'cpu': '8GB', 0: '2GB'}, 'storage': {'io': 'direct'}, 'dtype': 'bfloat16'}
    """
    tree: dict[str, Any] = {}
    for name, value in given.items():
        path = name.replace("max_memory_", "max_memory.", 1).split(".")
        node: dict[Any, Any] = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        last = path[-1]
        node[int(last) if last.isdecimal() else last] = value
    return tree


def _longest(pretrained: str, options: Mapping[str, Any]) -> int:
    """Return the tokens that ``hf`` takes to be the model's context, at most those of a window where nobody says it."""
    node = {**MODEL_KEYS, **options, "path": located(pretrained)}
    config, _ = read_class(node)
    context: int = resolve_max_length(config, load_tokenizer(ModelSource.of(node)), default=LONGEST_WINDOW)
    return min(context, LONGEST_WINDOW)


def main() -> None:
    """Run lm-eval's own command, whose registry has the model ``offstage`` now."""
    from lm_eval.__main__ import cli_evaluate

    def evaluate() -> int:
        cli_evaluate()
        return 0

    sys.exit(last_resort(evaluate))


if __name__ == "__main__":
    main()
