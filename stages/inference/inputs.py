"""What every result of a model depends on, whatever it is asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, Self

from offstage.pipeline.plain_data import walk
from offstage.pipeline.stage import Config, Context, SourceFiles
from offstage.stages.calls.options import hash_of
from offstage.stages.dispatch.dispatch_plan import FILE_NAME as DISPATCH_PLAN
from offstage.stages.empty_init.identity import text_identity
from offstage.stages.machine.kernels import choosers
from offstage.stages.plan.plan import FILE_NAME as PLAN

DATA_KEYS = (
    "generate.prompts_file", "score.texts_file", "score.text_file", "finetune.text_file", "forward.inputs",
    "forward.texts_file", "forward.images", "forward.audio",
)  # fmt: skip
"""The keys that name files of data, as paths or lists of paths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceInputs:
    """The results depend on the model and on how text becomes tokens, their metrics on the placement too.

    ``skeleton`` and ``weights`` are the keys of what earlier stages left, so of all that made it, the model's code too;
    ``placement`` is the hash of the dispatch plan. ``text`` has the hashes of the files that say how text becomes
    tokens and which options are the default, and ``kernels`` the variables of the environment that choose kernels;
    ``model`` is the config's node of that name.
    """

    skeleton: str
    weights: str
    placement: str
    trace: bool
    text: Mapping[str, object]
    libraries: Mapping[str, str]
    kernels: Mapping[str, str]
    model: Mapping[str, Any] = field(compare=False)

    def wherever_it_lies(self) -> Self:
        """Return these without what changes no result, only what it costs."""
        return replace(self, placement="", trace=False)


def gather_model(context: Context) -> dict[str, Any]:
    """Return the fields of ``InferenceInputs``, gathered from the run so far."""
    config = context.config
    return {
        "skeleton": context.artifact("empty_init").key,
        "weights": context.artifact("shard_load").key,
        "placement": context.artifact("dispatch").digest(DISPATCH_PLAN),
        "trace": config["trace"],
        "text": text_identity(config["model"]),
        "libraries": {name: metadata.version(name) for name in ("torch", "transformers", "tokenizers")},
        "kernels": choosers(),
        "model": config["model"],
    }


def inference_sources(inputs: InferenceInputs, context: Context, media: Mapping[str, str] | None = None) -> SourceFiles:
    """Return the files that ``inputs`` were gathered from: those that text is read by, and the data.

    Data are the files that the stages' keys name, and ``media``, each with its hash by where it was asked for.
    """
    data = {**_named_files(context.config), **(media or {})}
    return SourceFiles({"tokenizer": inputs.text, **({"data": data} if data else {})})


def _named_files(config: Config) -> dict[str, str]:
    """Return the hash of each file that a key of the run's own stages names, by that key."""
    hashes: dict[str, str] = {}
    for node in (node for node in DATA_KEYS if node.partition(".")[0] in config["stages"]):
        stage, key = node.split(".")
        value = (config.get(stage) or {}).get(key)
        for place, path in walk(value, node):
            if isinstance(path, str) and Path(path).is_file():
                hashes[place] = hash_of(Path(path))
    return hashes


def chosen_number(key: str, given: int | Literal["auto"] | None, context: Context) -> int | None:
    """Return the number that is ``given`` for ``key``, or where that is auto, the plan's."""
    if given != "auto":
        return given
    size: int | None = context.artifact("plan").json(PLAN)[key]
    return size
