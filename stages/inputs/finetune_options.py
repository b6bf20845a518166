"""What a model is trained with: the text, how it is cut into sequences and batches, the optimizer, what is kept.

It is read here, below the stage that trains, since a plan leaves room for gradients, the optimizer's moments and what
a forward saves for the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from offstage.pipeline.errors import ConfigError, Fault
from offstage.pipeline.typed_config import LEAST
from offstage.stages.inputs.prompts import check_seed
from offstage.stages.inputs.texts import read_text

LONGEST_SEQUENCE = 512
"""The tokens of a sequence where nobody says how many, and the model's context is longer or not known."""

Learns = Literal["nothing", "adapter", "all"]
"""Which of a model's weights are changed by a run: none, those of its adapter, or all that are floating."""

TEXT = "finetune.text_file"


@dataclass(frozen=True, slots=True)
class LoraOptions:
    """The keys below ``finetune.lora``; ``conf/config.yaml`` says what each means."""

    r: int = field(default=8, metadata={LEAST: 1})
    alpha: float = 16
    target_modules: Sequence[str] | str = "all-linear"

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of peft's ``LoraConfig``."""
        targets = self.target_modules if isinstance(self.target_modules, str) else list(self.target_modules)
        return {"r": self.r, "lora_alpha": self.alpha, "target_modules": targets, "task_type": "CAUSAL_LM"}


@dataclass(frozen=True, slots=True)
class ActivationOffload:
    """The keys below ``finetune.activation_offload``."""

    ratio: float | Literal["auto"] = 0.0
    target: Literal["host", "disk"] = "host"


@dataclass(frozen=True, slots=True)
class FinetuneOptions:
    """The keys below ``finetune``; ``conf/config.yaml`` says what each means."""

    text_file: str | None = None
    steps: int = field(default=10, metadata={LEAST: 1})
    batch_size: int = field(default=1, metadata={LEAST: 1})
    window: int | None = field(default=None, metadata={LEAST: 2})
    optimizer: Literal["adamw", "sgd"] = "adamw"
    learning_rate: float = 5e-5
    weight_decay: float = 0.01
    clip_norm: float | None = 1.0
    gradient_accumulation: int = field(default=1, metadata={LEAST: 1})
    checkpointing: bool = False
    lora: LoraOptions | None = None
    activation_offload: ActivationOffload = field(default_factory=ActivationOffload)
    seed: int = 0
    save_every: int = field(default=50, metadata={LEAST: 1})

    def sequence(self, context: int) -> int:
        """Return the tokens of a sequence for a model with positions for ``context`` tokens, 0 where not known."""
        return self.window or min(context or LONGEST_SEQUENCE, LONGEST_SEQUENCE)


def check_training(options: FinetuneOptions) -> Iterable[Fault]:
    """Yield what is wrong with the text and the optimizer, as far as the model needn't be known."""
    yield from check_seed("finetune.seed", options.seed)
    yield from _check_rates(options)
    yield from _check_lora(options.lora)
    ratio = options.activation_offload.ratio
    if ratio != "auto" and not 0 <= ratio <= 1:
        yield Fault("finetune.activation_offload.ratio", f"{ratio} is no share of bytes; give one from 0 to 1, or auto")
    if options.text_file is None:
        yield Fault(TEXT, f"None is no file; give the text to train on: {TEXT}=FILE")
        return
    try:
        read_text(TEXT, options.text_file)
    except ConfigError as error:
        yield Fault.of(error)


def _check_rates(options: FinetuneOptions) -> Iterable[Fault]:
    if not 0 < options.learning_rate < math.inf:
        yield Fault("finetune.learning_rate", f"{options.learning_rate} is no rate; give a finite number above 0")
    if not 0 <= options.weight_decay < math.inf:
        yield Fault("finetune.weight_decay", f"{options.weight_decay} is no decay; give a finite number from 0")
    if options.clip_norm is not None and not 0 < options.clip_norm < math.inf:
        yield Fault("finetune.clip_norm", f"{options.clip_norm} is no norm; give a finite number above 0, or null")


def _check_lora(lora: LoraOptions | None) -> Iterable[Fault]:
    if lora is None:
        return
    if not 0 < lora.alpha < math.inf:
        yield Fault("finetune.lora.alpha", f"{lora.alpha} is no scale; give a finite number above 0")
    if not lora.target_modules or not all(lora.target_modules):
        yield Fault(
            "finetune.lora.target_modules",
            f"{lora.target_modules!r} names no modules; give a list of their names, a pattern, or all-linear",
        )
