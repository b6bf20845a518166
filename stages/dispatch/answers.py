"""What a loaded model is asked from Python, and what it answers: the stages that ask a model, over one that is loaded.

A stage is looked up by its name, as a run looks it up. It checks its own keys, gathers its own inputs, and its session
asks the model, so that answers are those of the command to the bit; no artifact is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from offstage.pipeline.errors import BudgetError, Fault, raise_faults
from offstage.pipeline.installed_stages import stage_class
from offstage.pipeline.interpreter import with_frame_room
from offstage.pipeline.stage import Artifact, Config
from offstage.pipeline.stage_chain import StageChain
from offstage.pipeline.typed_config import defaults, type_faults
from offstage.stages.empty_init.stage import EmptyInitStage
from offstage.stages.inputs.generate_options import CACHE
from offstage.stages.inputs.quantized_cache import CACHE_CONFIG
from offstage.stages.plan import plan as plans
from offstage.stages.plan.request.requests import effective_options
from offstage.stages.plan.stage import PlanStage


@dataclass(frozen=True, slots=True)
class Generation:
    """What came of one prompt: ``text``, null without a tokenizer, and the new ``token_ids``.

    ``prompt_token_ids`` are those of the prompt as the model got it, null where there are images or recordings in
    it. ``finish_reason`` is ``"stop"`` where an end token or a stop string ended the answer, ``"length"`` where no
    more tokens were asked for. ``logprobs`` are the natural logarithms of the model's own probability of each new
    token, null where they weren't asked for. Those with one number of a ``batch`` were computed together.
    """

    text: str | None
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...] | None
    finish_reason: Literal["stop", "length"]
    logprobs: tuple[float | None, ...] | None
    batch: int


@dataclass(frozen=True, slots=True)
class Score:
    """How likely the model finds a text: the ``logprobs`` of its scored ``token_ids``, and what they come to.

    ``log_likelihood`` is their sum and ``perplexity`` the exponential of their mean, negated; null where one isn't
    finite. ``bits_per_byte`` is null too where token ids were given. ``is_greedy`` says whether each token is the
    likeliest one.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    log_likelihood: float | None
    perplexity: float | None
    bits_per_byte: float | None
    is_greedy: bool


class AskContext:
    """What a stage is lent that asks the model of ``chain``: its artifacts and live halves, under a ``config`` that
    has the stage's keys too.

    How many go together, where the stage's config leaves that open, is planned in the budgets that the loaded plan
    has; where there is no room beside what is loaded, or nothing streams, prompts are taken in turn.
    """

    show_text: Callable[[str], object] | None = None

    def __init__(self, chain: StageChain, config: Config, *, plans_anew: bool) -> None:
        self._chain, self.config, self.cache, self.host_peak = chain, config, chain.cache, chain.host_peak
        self._planned = StageChain([EmptyInitStage(), PlanStage()], self._in_budgets(), cache=chain.cache)
        if plans_anew:
            with suppress(BudgetError):
                for name in self._planned.stages:
                    self._planned.obtain(name)

    def artifact(self, stage: str) -> Artifact:
        """Return the artifact of the earlier stage ``stage``."""
        return self._planned.artifacts.get(stage) or self._chain.artifact(stage)

    def live(self, stage: str) -> Any:
        """Return the live half of the earlier stage ``stage``."""
        return self._chain.live(stage)

    def release(self) -> None:
        """End the use of what was planned."""
        self._planned.release()

    def _in_budgets(self) -> dict[str, Any]:
        budgets = self._chain.artifact(PlanStage.name).read(plans.Plan, plans.FILE_NAME).budgets
        given = {str(device): str(size) for device, size in budgets.items() if size is not None}
        return {**self.config, "max_memory": given}


@with_frame_room
def ask(
    chain: StageChain, name: str, keys: Mapping[str, Any], *, plans_anew: bool = False, progress: Path | None = None
) -> tuple[Any, Any, Any]:
    """Return the session in which the stage ``name`` asked the model of ``chain`` under ``keys``, and what it returned.

    That is the pass's result, and its results one by one. ``plans_anew`` says whether how many prompts go together is
    planned where ``keys`` leave it open. Results are kept in the file ``progress`` as they come, and those that are
    there are taken. Raises the errors of the stage's config, all faults together.
    """
    stage = stage_class(name)()
    config = {**chain.config, **defaults(stage.config_class), **keys, "stages": [*chain.stages, name]}
    raise_faults(list(asked_faults(name, config)))
    if name == "generate":
        raise_faults(list(_cache_faults(chain.config, config)))
    context = AskContext(chain, config, plans_anew=plans_anew)
    try:
        session = stage.session(stage.gather(context), context)
        return (session, *session.ask(progress))
    finally:
        context.release()


def asked_faults(name: str, config: Config) -> Iterable[Fault]:
    """Return what the stage ``name`` finds wrong with ``config``: types first, and files last."""
    stage = stage_class(name)()
    return list(type_faults(stage.config_class, config)) or list(stage.check(config)) or stage.examine(config)


def planned_request(batch_size: int, max_length: int, *, in_lockstep: bool) -> dict[str, dict[str, Any]]:
    """Return what each stage would ask of a model that it was given so many sequences of so many tokens.

    Those ``in_lockstep`` compute one at a time: what they take together are their caches.
    """
    generate = {"prompts": [[0] * max(1, max_length // 2)] * batch_size, "max_length": max_length}
    generate["lockstep" if in_lockstep else "batch_size"] = batch_size
    score = {"texts": [[0] * max_length] * batch_size, "window": max_length, "batch_size": batch_size}
    return {"generate": generate, "score": score}


def cache_options(generate: Mapping[str, Any]) -> dict[str, Any]:
    """Return those options of ``generate`` that say which kind of cache there is."""
    return {name: generate[name] for name in (CACHE, CACHE_CONFIG) if generate.get(name) is not None}


def _cache_faults(loaded: Config, asked: Config) -> Iterator[Fault]:
    """Yield that calls ask for a kind of cache that the plan of the load has no room for."""
    planned, given = (effective_options(config["generate"], config["model"]) for config in (loaded, asked))
    rule = "isn't what the model was loaded for, and its plan leaves room for that alone; load it with"
    kind = given.options.get(CACHE)
    if (planned.keeps_cache_on_host, planned.quantized_cache is None) != (
        given.keeps_cache_on_host,
        given.quantized_cache is None,
    ):
        yield Fault(f"generate.{CACHE}", f"{kind!r} {rule} {CACHE}={kind!r}")
    elif planned.quantized_cache != given.quantized_cache:
        config = given.options.get(CACHE_CONFIG)
        yield Fault(f"generate.{CACHE_CONFIG}", f"{config!r} {rule} {CACHE_CONFIG}={config!r}")


def generations(session: Any, rows: Any) -> list[Generation]:
    """Return the ``rows`` of a session of generate, in the order of its prompts."""
    return [
        Generation(
            text=row["text"],
            token_ids=tuple(row["token_ids"]),
            prompt_token_ids=tuple(session.encoded[row["index"]]) or None,
            finish_reason=row["finish_reason"],
            logprobs=tuple(row["logprobs"]) if "logprobs" in row else None,
            batch=row["batch"],
        )
        for row in rows
    ]


def score_of(text: Mapping[str, Any]) -> Score:
    """Return what the stage score tells of a ``text``."""
    return Score(
        token_ids=tuple(text["token_ids"]),
        logprobs=tuple(text["log_likelihoods"]),
        log_likelihood=text["log_likelihood"],
        perplexity=text["perplexity"],
        bits_per_byte=text["bits_per_byte"],
        is_greedy=text["is_greedy"],
    )
