"""The assistant that guesses tokens ahead: a second, small model, whole on the device that computes the first.

The model judges its guesses in one forward and keeps those that it would have chosen itself, so that what streams for a
forward serves several tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from offstage.pipeline.errors import CheckpointError, ConfigError, Fault, OffstageError, StorageError, apart
from offstage.pipeline.stage import Context
from offstage.stages.checkpoints.checkpoint import Checkpoint, identity, open_checkpoint
from offstage.stages.checkpoints.generation_defaults import read_generation_config
from offstage.stages.checkpoints.model_source import ModelSource
from offstage.stages.checkpoints.tokenizers import load_tokenizer
from offstage.stages.checkpoints.weight_files import gguf_file
from offstage.stages.empty_init.identity import quantization_fault, text_identity
from offstage.stages.plan import plan as plans
from offstage.stages.plan.request.geometry import read_geometry
from offstage.stages.plan.request.requests import assistant_node, assistant_weights

_KEY = "generate.assistant_model"
_OWN_OPTIONS = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
"""Options that transformers takes from what the assistant itself has as its defaults."""


def check_assistant_folder(path: str | None) -> Iterable[Fault]:
    """Yield why the folder ``path`` can't be an assistant's, as far as its files show it; null: there is none."""
    if path is None:
        return
    if gguf_file(Path(path)) is not None:
        yield Fault(_KEY, f"{path!r} is in GGUF, which a model is read from, not an assistant; give one of safetensors")
        return
    if not path or not ModelSource(path).folder.is_dir():
        yield Fault(_KEY, f"{path!r} is no folder; give that of a small checkpoint with the same tokenizer")
        return
    try:
        _open(path)
        fault = quantization_fault(ModelSource(path).folder)
    except (CheckpointError, StorageError) as error:
        fault = str(error).removeprefix("model.path: ")
    if fault:
        yield Fault(_KEY, fault)


def check_assistant(path: str | None, model: Mapping[str, Any]) -> Iterable[Fault]:
    """Yield what of its kind, words or tokenizer the assistant in ``path`` doesn't have in common with ``model``."""
    node = assistant_node(path)
    if node is None or list(check_assistant_folder(path)):
        return
    if model.get("kind") != "pretrained":
        yield Fault(_KEY, "a model of model=module has no generate() that takes an assistant; leave it out")
        return
    mine, other = map(read_geometry, (model, node))
    if mine.has_encoder != other.has_encoder:
        yield Fault(_KEY, f"{node['path']!r} has an encoder where the model has none, or the other way; give one alike")
    elif mine.vocabulary != other.vocabulary:
        yield Fault(
            _KEY,
            f"{node['path']!r} has {other.vocabulary} words and the model {mine.vocabulary}; give one of its tokenizer",
        )
    elif not _share_tokens(model, node):
        yield Fault(
            _KEY, f"{node['path']!r} has a tokenizer with other tokens than the model's; give one with the same"
        )


def _share_tokens(model: Mapping[str, Any], node: Mapping[str, Any]) -> bool:
    """Return whether each id is one token to both; where one has no tokenizer that loads, nothing is compared."""
    with suppress(OffstageError):  # which is said where it is used
        mine, other = load_tokenizer(ModelSource.of(model)), load_tokenizer(ModelSource.of(node))
        return mine is None or other is None or bool(mine.get_vocab() == other.get_vocab())
    return True


def assistant_identity(path: str | None) -> Mapping[str, object] | None:
    """Return which checkpoint the assistant in ``path`` is, as a key holds it; null where there is none."""
    node = assistant_node(path)
    if node is None:
        return None
    return {"checkpoint": identity(_open(node["path"])), "text": text_identity(node)}


def _open(path: str) -> Checkpoint:
    return open_checkpoint(ModelSource(path).folder)


class Assistant:
    """A loaded assistant, and what it guesses with by default."""

    def __init__(self, model: Any, defaults: Any) -> None:
        self._model, self._defaults = model, defaults

    def for_prompt(self, options: Mapping[str, Any]) -> Any:
        """Return the model as it is given to ``generate`` for a prompt with these ``options``.

        It guesses as if no prompt had come before: how many tokens it dares is learnt anew, so that a run that goes on
        where another was killed does what that would have done.
        """
        if self._defaults is not None:
            self._model.generation_config = copy.deepcopy(self._defaults)
        for name in _OWN_OPTIONS:
            if options.get(name) is not None:
                setattr(self._model.generation_config, name, options[name])
        return self._model


@contextmanager
def loaded_assistant(path: str | None, context: Context) -> Iterator[Assistant | None]:
    """Have the assistant in the folder ``path`` on the plan's main device inside; null where there is none.

    The plan has left room for it. What of it can't be used is the config's fault.
    """
    if path is None:
        yield None
        return
    from offstage.stages.dispatch import load

    main = context.artifact("plan").read(plans.Plan, plans.FILE_NAME).main_device
    whole = {main: 2 * assistant_weights(ModelSource(path).folder)}
    options = {"hardware": context.config["hardware"], "cache": context.cache}
    try:
        loaded = load(path, max_memory=whole, device_map=main, batch_size=1, max_length=2, **options)
    except (ConfigError, CheckpointError) as error:
        raise ConfigError(f"{_KEY}: {path!r} can't be loaded: {error}") from apart(error)
    with loaded:
        if not getattr(loaded.model, "can_generate", lambda: False)():
            raise ConfigError(f"{_KEY}: {path!r} is no model that generates; give one of the model's own kind")
        defaults = read_generation_config(ModelSource(path).folder)
        yield Assistant(loaded.model, defaults or copy.deepcopy(loaded.model.generation_config))
