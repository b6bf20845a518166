"""Generation options: every option of transformers' GenerationConfig, by its own name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import transformers
from transformers import GenerationConfig
from transformers.generation import logits_process as processors

from offstage.pipeline.errors import CheckpointError, ConfigError, Fault, closest, foreign, words_of
from offstage.pipeline.plain_data import unrecordable
from offstage.pipeline.regular_files import read_object
from offstage.stages.checkpoints.generation_defaults import GENERATION_CONFIG, TOKEN_OPTION, read_generation_config
from offstage.stages.checkpoints.model_source import ModelSource
from offstage.stages.checkpoints.tokenizers import load_tokenizer
from offstage.stages.empty_init.identity import read_config
from offstage.stages.generate.host_cache import why_not_on_host
from offstage.stages.generate.prompts import token_ids
from offstage.stages.generate.quantized_cache import quantized_faults
from offstage.stages.generate.shared_cache import why_not_shared
from offstage.stages.inputs.generate_options import (
    CACHE,
    LOOKUP,
    OFFLOADED,
    OWN_KEYS,
    QUANTIZED,
    GenerateOptions,
    is_count,
)
from offstage.stages.inputs.prompts import Prompt, check_seed
from offstage.stages.inputs.quantized_cache import CACHE_CONFIG

PLAIN_OPTIONS = ("max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "eos_token_id")
"""What the plain loop understands, for models without a ``generate`` of their own."""

CACHES = ("dynamic", "static", OFFLOADED, QUANTIZED)
"""The values of ``cache_implementation`` that a run can have: all but the third stay where the model computes."""

_COUNTS = {"max_new_tokens": "tokens", "num_beams": "beams", "num_return_sequences": "sequences"}
_PROCESSORS: Mapping[str, Callable[[Any], object]] = {
    "repetition_penalty": processors.RepetitionPenaltyLogitsProcessor,
    "no_repeat_ngram_size": processors.NoRepeatNGramLogitsProcessor,
}
_WARPERS: Mapping[str, Callable[[Any], object]] = {
    "temperature": processors.TemperatureLogitsWarper,
    "top_k": processors.TopKLogitsWarper,
    "top_p": processors.TopPLogitsWarper,
    "min_p": processors.MinPLogitsWarper,
    "typical_p": processors.TypicalLogitsWarper,
    "epsilon_cutoff": processors.EpsilonLogitsWarper,
    "eta_cutoff": processors.EtaLogitsWarper,
}
_ADVICE = {"temperature": "; give a number above 0, or generate.do_sample=false for the likeliest tokens"}
_OPTIONS_OF: Mapping[str, Mapping[str, type[str | bool]]] = {
    "whisper": {"language": str, "task": str, "return_timestamps": bool},
}
_WORDS = {str: "text", bool: "flag: give true or false"}
_UNUSED = {"no_repeat_ngram_size": 0, "top_k": 0, "typical_p": 1.0, "epsilon_cutoff": 0, "eta_cutoff": 0}
"""The values with which an option changes nothing, and that its processor refuses."""


def check_options(given: GenerateOptions, model: Mapping[str, Any] | None = None) -> Iterable[Fault]:
    """Yield the ``given`` options that transformers doesn't know, and those whose values it refuses.

    A ``model`` may have options of its own.
    """
    strange = [Fault(f"generate.{place}", why) for place, why in unrecordable(given.options)]
    if strange:
        yield from strange
        return
    names = {name for name in vars(GenerationConfig()) if not name.startswith("_") and name != "transformers_version"}
    options, own = given.options, _own_options(model or {})
    for name in (name for name in options if name not in names | own.keys()):
        near = closest(name, [*names, *OWN_KEYS, *own])
        yield Fault(f"generate.{name}", f"no such option{near}; see GenerationConfig")
    for name in options.keys() & own.keys():
        if not isinstance(options[name], own[name]):
            yield Fault(f"generate.{name}", f"{options[name]!r} is no {_WORDS[own[name]]}")
    yield from _token_faults(options)
    for name in (name for name in {**_PROCESSORS, **_WARPERS} if not _is_number(options.get(name, 0))):
        yield Fault(f"generate.{name}", f"{options[name]!r} is no number")
    uncounted = [name for name in _COUNTS if not is_count(options.get(name, 1))]
    for name in uncounted:
        yield Fault(
            f"generate.{name}", f"{options[name]!r} is no number of {_COUNTS[name]}; give a whole number from 1"
        )
    if uncounted:
        return
    try:
        GenerationConfig(**{name: value for name, value in options.items() if name in names}).validate()
    except (ValueError, TypeError, AttributeError) as error:
        message = (str(error).strip() or type(error).__name__).splitlines()[0]
        yield Fault("generate", f"transformers refuses these options: {message}")


def _is_number(value: Any) -> bool:
    """Return whether ``value`` is a number or null; transformers looks at one only where it is used."""
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _own_options(model: Mapping[str, Any]) -> Mapping[str, type[str | bool]]:
    """Return the options that the generate of the checkpoint's model has beside those of all, with their types."""
    if model.get("kind") != "pretrained":
        return {}
    return _OPTIONS_OF.get(str(read_object(ModelSource.of(model).folder / "config.json").get("model_type")), {})


def _token_faults(options: Mapping[str, Any]) -> Iterable[Fault]:
    """Yield those of ``options`` that should name tokens and don't: nothing in transformers looks at them early."""
    for name in (name for name in options if name.endswith(TOKEN_OPTION)):
        try:
            token_ids(name, options[name])
        except ConfigError as error:
            yield Fault.of(error)


def check_own_options(
    prompts: Mapping[str, Prompt], given: GenerateOptions, model: Mapping[str, Any]
) -> Iterable[Fault]:
    """Yield what is wrong with the options that single ``prompts`` bring, each set of them once."""
    seen: list[Mapping[str, Any]] = []
    for name, prompt in prompts.items():
        if not prompt.options or prompt.options in seen:
            continue
        seen.append(prompt.options)
        own = dict(prompt.options)
        yield from check_seed(f"{name}.seed", own.pop("seed", 0))
        both = given.of_prompt(own)
        caches = {given.options.get(CACHE), both.options.get(CACHE)}
        for kind in (kind for kind in (OFFLOADED, QUANTIZED) if len(caches) > 1 and kind in caches):
            yield Fault(f"{name}.{CACHE}", f"{kind!r} is for all prompts or none: a plan leaves room for one kind")
        if len(caches) == 1 and given.quantized_cache != both.quantized_cache:
            yield Fault(
                f"{name}.{CACHE_CONFIG}", "is for all prompts or none: a plan leaves room for one kind of cache"
            )
        for fault in list(check_options(both, model)) or check_served(both, model):
            yield Fault(f"{name}{fault.key.removeprefix('generate')}", fault.message, fault.error)


def check_served(given: GenerateOptions, model: Mapping[str, Any]) -> Iterable[Fault]:
    """Yield the options, given or the checkpoint's own defaults, that a run can't serve: seen before weights are read.

    A ``model`` of ``kind=module`` is left out: which options it takes, its own code says.
    """
    if model.get("kind") != "pretrained":
        return
    folder = ModelSource.of(model).folder
    try:
        defaults = read_generation_config(folder)
        effective = {**(defaults.to_dict() if defaults is not None else {}), **given.options}
        with foreign(ConfigError, "generate: transformers refuses these options"):
            refusals = [*_removed(effective), *_unserved(effective, model), *_unguessable(effective, given, model)]
            refusals += _untold(given, model)
            quantises = effective.get(CACHE) == QUANTIZED
            faults = list(quantized_faults(effective, _architecture(model), folder)) if quantises else []
    except (ConfigError, CheckpointError) as error:
        yield Fault("generate", str(error).removeprefix("generate: "), type(error))
        return
    yield from faults
    here = {**given.options, "assistant_model": given.assistant_model, "output_logprobs": given.output_logprobs}
    for name, message in refusals:
        asked = repr(here[name]) if name in here else f"{effective[name]!r} ({folder / GENERATION_CONFIG} says so)"
        yield Fault(f"generate.{name}", f"{asked} {message}")


def _removed(options: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Yield the options that ask for a way to decode that transformers has only as remote code by now."""
    greedy = not options.get("do_sample") and (options.get("num_beams") or 1) == 1
    contrastive = greedy and (options.get("penalty_alpha") or 0) > 0 and options.get("top_k") not in (0, 1)
    asked = {
        "penalty_alpha": contrastive,
        "dola_layers": options.get("dola_layers") is not None,
        "constraints": options.get("constraints") is not None,
        "force_words_ids": options.get("force_words_ids") is not None,
        "num_beam_groups": not greedy and (options.get("num_beam_groups") or 1) > 1,
    }
    for name in (name for name, asks in asked.items() if asks):
        yield name, "asks for a way to decode that transformers has as remote code only, which isn't run; leave it out"


def _unserved(options: Mapping[str, Any], model: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    if options.get(CACHE) not in (None, *CACHES):
        yield CACHE, f"is no cache that a run can have; give {' or '.join(CACHES)}, or leave it out"
    if options.get(CACHE) == OFFLOADED and (why := why_not_on_host(_architecture(model), ModelSource.of(model).folder)):
        yield CACHE, f"asks for keys and values that wait on the host, and {why}; leave it out"
    if options.get("stop_strings") and load_tokenizer(ModelSource.of(model)) is None:
        yield "stop_strings", "needs a tokenizer, and the checkpoint has none; set model.tokenizer"
    for name, processor in _processors(options):
        try:
            processor(options[name])
        except (ValueError, TypeError) as error:
            yield name, f"is refused by transformers: {words_of(error)}{_ADVICE.get(name, '')}"
    words = options.get("bad_words_ids")
    if words is not None:
        processors.NoBadWordsLogitsProcessor(words, eos_token_id=options.get("eos_token_id"))


def _unguessable(
    options: Mapping[str, Any], given: GenerateOptions, model: Mapping[str, Any]
) -> Iterable[tuple[str, str]]:
    """Yield the options that transformers refuses where tokens are guessed, by an assistant or from the prompt."""
    asked = {"assistant_model": given.assistant_model, LOOKUP: options.get(LOOKUP)}
    guessing = [name for name, value in asked.items() if value]
    if not guessing:
        return
    refused = {
        "num_beams": (options.get("num_beams") or 1) > 1,
        "num_return_sequences": (options.get("num_return_sequences") or 1) > 1,
        CACHE: options.get(CACHE) not in (None, "dynamic"),
        "use_cache": options.get("use_cache") is False,
        LOOKUP: len(guessing) > 1,
    }
    for name in (name for name, refuses in refused.items() if refuses):
        yield name, f"can't go with generate.{guessing[0]}, which drafts for one sequence at a time; leave one out"
    name = _architecture(model)
    if getattr(getattr(transformers, name, None), "_is_stateful", False):
        yield guessing[-1], f"asks to take tokens back, which {name} can't; leave it out"
    elif given.judges_exactly and (why := why_not_shared(name, ModelSource.of(model).folder)):
        yield (
            guessing[-1],
            f"asks for several forwards over one cache, and {why}; leave it out, or set generate.speculation=batched",
        )


def _untold(given: GenerateOptions, model: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Yield log-probabilities where they are asked of a model that decodes parts of a recording again and again."""
    if given.output_logprobs and "Whisper" in _architecture(model):
        yield "output_logprobs", "isn't served for Whisper, which may decode a part of a recording twice; leave it out"


def _architecture(model: Mapping[str, Any]) -> str:
    names = read_config(ModelSource.of(model).folder).get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def _processors(options: Mapping[str, Any]) -> Iterator[tuple[str, Callable[[Any], object]]]:
    """Yield the options of one value that change logits, with what transformers makes of them when it generates."""
    for name, processor in ({**_PROCESSORS, **(_WARPERS if options.get("do_sample") else {})}).items():
        if options.get(name) not in (None, _UNUSED.get(name)):
            yield name, processor


def plain_options(options: Mapping[str, Any], defaults: GenerationConfig | None) -> dict[str, Any]:
    """Return the options of the plain loop, or raise a ``ConfigError`` that names those it doesn't understand."""
    strangers = sorted(set(options) - set(PLAIN_OPTIONS))
    if strangers:
        raise ConfigError(
            f"generate.{strangers[0]}: this model has no generate() of transformers, and the plain loop knows only "
            + ", ".join(PLAIN_OPTIONS)
        )
    values = {name: getattr(defaults, name, None) for name in PLAIN_OPTIONS} if defaults else {}
    return {**{name: value for name, value in values.items() if value is not None}, **options}
