"""What prompts with images or audio take of a model: the tokens that they come to, and the moments of their forwards.

Only the processor tells how many tokens an image has, and only the model's code what its encoder holds. So both are
asked once, before the plan is made, and what they said is kept beside the figures of the machine: a run that is served
from the cache imports neither.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offstage.pipeline.cache.fingerprint import fingerprint
from offstage.pipeline.decoding import decode
from offstage.pipeline.errors import ConfigError
from offstage.pipeline.stage import MEASURED, Config
from offstage.stages.checkpoints.model_source import ModelSource
from offstage.stages.empty_init.identity import text_identity
from offstage.stages.empty_init.skeleton import CacheSpec, Moment, monomials
from offstage.stages.inputs.generate_options import GenerateOptions, read_generate
from offstage.stages.inputs.media_files import media_libraries
from offstage.stages.inputs.prompts import Prompt, prompt_inputs, read_prompts
from offstage.stages.machine.kept_figures import kept_figure
from offstage.stages.plan.request.geometry import encoder_rows_bytes

if TYPE_CHECKING:
    import torch
    from torch import nn

FILE_NAME = "media.json"

_DECODING, _PROCESSING = 8, 4
"""How many times the bytes of decoded media, and of what the processor makes of them, are held while it is made."""
_VERSION = 1
"""Raised when a figure that was kept before says something else than one that is measured now."""
_CONSTANT = (0.0,) * (len(monomials(1, 1)) - 1)


@dataclass(frozen=True, slots=True)
class MediaDemand:
    """The ``tokens`` of the longest prompt, or of what its encoder makes; ``moments`` of a forward that holds most.

    The moments are those of one sequence, at the one shape that its prompt has; ``caches`` are what it leaves, of a
    decoder beside an encoder: of others the model's skeleton has them.
    """

    tokens: int
    moments: tuple[Moment, ...]
    caches: tuple[CacheSpec, ...] = ()

    def for_copies(self, copies: int) -> tuple[Moment, ...]:
        """Return the moments of so many sequences of one prompt."""
        return tuple(
            replace(
                moment,
                activations=tuple(copies * factor for factor in moment.activations),
                operands=tuple(tuple(copies * factor for factor in operand) for operand in moment.operands),
            )
            for moment in self.moments
        )


def media_demand(config: Config, cache: Path, *, skeleton: str, live: Callable[[], nn.Module]) -> MediaDemand | None:
    """Return what the prompts of ``generate`` that have media take; null where there are none, or where they are bad.

    ``skeleton`` is the key of the model, and ``live`` returns it on meta. What is bad of prompts is for ``generate`` to
    report.
    """
    given, model = read_generate(config.get("generate") or {}), config.get("model") or {}
    try:
        prompts = {name: prompt for name, prompt in read_prompts(given).items() if prompt.media}
    except ConfigError:
        return None
    if not prompts:
        return None
    asked = {"chat": given.chat, "system": given.system}
    key = fingerprint([_VERSION, list(prompts.values()), asked, skeleton, text_identity(model), media_libraries()])
    probe = partial(_measure, prompts, given, model, live)
    try:
        figure = kept_figure(cache / MEASURED, FILE_NAME, key, probe)
    except ConfigError:
        return None
    return None if figure is None else decode(MediaDemand, figure)


def _measure(
    prompts: Mapping[str, Prompt], given: GenerateOptions, model: Mapping[str, Any], live: Callable[[], nn.Module]
) -> dict[str, Any]:
    """Return the figure of ``prompts``: of all of them the tokens, the moments of the one whose inputs are largest."""
    from offstage.stages.empty_init.rehearsed_call import weigh_media
    from offstage.stages.inputs.prompt_processor import PromptProcessor

    processor = PromptProcessor(ModelSource.of(model), key=next(iter(prompts)))
    tokens, preparing = 0, 0
    largest: dict[str, torch.Tensor] = {}
    for name, prompt in prompts.items():
        tensors_of = prompt_inputs(name, prompt, processor, given)
        tokens, size = max(tokens, len(tensors_of.ids)), _bytes(tensors_of.tensors)
        preparing = max(preparing, _DECODING * tensors_of.decoded_bytes + _PROCESSING * size)
        largest = dict(tensors_of.tensors) if size > _bytes(largest) else largest
    weighed, encoded = weigh_media(live(), largest)
    moments = weighed.moments
    if not moments:
        rows = encoder_rows_bytes(model, {name: tuple(one.shape) for name, one in largest.items()})
        moments = (Moment((float(rows + 2 * _bytes(largest)), *_CONSTANT)),)
    moments = (Moment((float(preparing), *_CONSTANT)), *moments)
    return asdict(MediaDemand(max(tokens, encoded), moments, weighed.caches if encoded else ()))


def _bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
