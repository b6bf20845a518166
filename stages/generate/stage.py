"""The stage generate: a dispatched model and prompts → tokens, texts and metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offstage.pipeline.errors import ConfigError, Fault
from offstage.pipeline.stage import Artifact, Config, Context, SourceFiles
from offstage.pipeline.typed_config import OPEN, PATHS, PATHS_INSIDE, STANDARD_INPUT, absolute, read
from offstage.stages.generate.assistant import assistant_identity, check_assistant, check_assistant_folder
from offstage.stages.generate.declared_metrics import GENERATE_METRICS, SECONDS
from offstage.stages.generate.inputs import GENERATIONS, GenerateInputs
from offstage.stages.generate.transcript import transcript
from offstage.stages.inference.inputs import chosen_number, gather_model, inference_sources
from offstage.stages.inference.measured_stage import MeasuredStage
from offstage.stages.inference.progress import earlier_told
from offstage.stages.inputs.generate_options import BATCHED, GenerateOptions, read_generate
from offstage.stages.inputs.media_files import media_libraries
from offstage.stages.inputs.prompts import check_prompts, check_seed, read_prompts, with_media

if TYPE_CHECKING:
    from offstage.stages.generate.generation import GenerationSession

FILE_NAME = "generation.json"
_APART = ("prompts", "prompts_file", "assistant_model")
"""The keys of ``generate`` that a generation doesn't depend on as they are, but by what they name."""
_SHOWN = 20
"""How many generations are shown on the screen."""


@dataclass(frozen=True, slots=True)
class GenerateConfig:
    """The prompts and options of transformers' ``GenerationConfig`` by their own names, and the seed of sampling."""

    generate: Mapping[str, Any] = field(
        default_factory=dict,
        metadata={
            OPEN: GenerateOptions,
            PATHS: {"prompts_file": absolute, "assistant_model": absolute},
            PATHS_INSIDE: {"prompts": with_media},
            STANDARD_INPUT: {"prompts_file": "prompts"},
        },
    )
    seed: int = 0


class GenerateStage(MeasuredStage[GenerateInputs]):
    """Leaves ``generation.json``: prompts, texts, token ids, metrics. Its live half asks the same of the model again.

    A build that was killed is gone on with: what it had generated is in ``generations.jsonl``. How often a generation
    is timed is no part of its key: repeats beyond the first are kept beside it.
    """

    name = "generate"
    doing = "answers the prompts"
    version = 11
    needs: tuple[str, ...] = ("dispatch",)
    config_class = GenerateConfig
    resumes = (GENERATIONS,)
    file_name = FILE_NAME
    results = "tokens"
    metrics = GENERATE_METRICS
    seconds = SECONDS

    def check(self, config: Config) -> Iterable[Fault]:
        """Yield what is wrong with the prompts and the seed."""
        given = read(GenerateConfig, config)
        asked = read_generate(given.generate)
        yield from check_prompts(asked)
        yield from check_assistant_folder(asked.assistant_model)
        yield from check_seed("seed", given.seed)

    def examine(self, config: Config) -> Iterable[Fault]:
        """Yield the generation options that transformers doesn't know, and those that a run can't serve."""
        from offstage.stages.empty_init.transformers_import import import_models

        import_models()
        from offstage.stages.generate.options import check_options, check_own_options, check_served
        from offstage.stages.generate.prompts import check_encoded

        asked, model = read_generate(config["generate"]), config["model"]
        assisted = check_assistant(asked.assistant_model, model)
        looks = (check_options(asked, model), check_served(asked, model), assisted)
        faults = next(filter(None, map(list, looks)), [])
        yield from faults
        if faults:
            return
        try:
            prompts = read_prompts(asked)
        except ConfigError:
            return  # ``check`` says it
        yield from list(check_own_options(prompts, asked, model)) or check_encoded(prompts, asked, model)

    def gather(self, context: Context) -> GenerateInputs:
        """Return the model's identity and placement, the prompts and every option."""
        given = read(GenerateConfig, context.config)
        asked = read_generate(given.generate)
        prompts = read_prompts(asked)
        size = chosen_number("batch_size", asked.batch_size, context)
        together = chosen_number("lockstep", asked.batches_together, context) or 1
        options = {**given.generate, "batch_size": size, "lockstep": together}
        return GenerateInputs(
            prompts=list(prompts.values()),
            names=list(prompts),
            options={key: one for key, one in options.items() if key not in _APART and (key, one) != ("lockstep", 1)},
            asked=replace(asked, batch_size=size, lockstep=together),
            assistant=assistant_identity(asked.assistant_model),
            seed=given.seed,
            decoders=media_libraries() if any(prompt.media for prompt in prompts.values()) else {},
            **gather_model(context),
        )

    def sources(self, inputs: GenerateInputs, context: Context) -> SourceFiles:
        """Return the files of prompts, of their images and recordings, of the tokenizer, and which assistant it is."""
        media = {
            f"{name}.media[{index}]": file.sha256
            for name, prompt in zip(inputs.names, inputs.prompts, strict=True)
            for index, file in enumerate(prompt.media)
        }
        sources = inference_sources(inputs, context, media)
        return sources if inputs.assistant is None else SourceFiles({**sources.inputs, "assistant": inputs.assistant})

    def session(self, inputs: GenerateInputs, context: Context) -> GenerationSession:
        """Return the model and what it is asked, ready to be asked."""
        from offstage.stages.generate.generation import GenerationSession

        return GenerationSession(inputs, context)

    def screen(self, data: Mapping[str, Any], artifact: Artifact) -> str:
        """Return the texts."""
        return "\n\n".join(_screen(data, artifact.path(GENERATIONS)))

    def remarks(self, metrics: Mapping[str, Any]) -> tuple[str, ...]:
        """Say where drafts were judged together."""
        if metrics.get("speculation") != BATCHED:
            return ()
        return (
            "Several drafts were verified in one forward (generate.speculation=batched): the last bits of what is "
            "computed, and so tokens, may differ from those of plain decoding.",
        )

    def describe(self, outputs: Sequence[Mapping[str, Any]], metrics: Mapping[str, Any]) -> str:
        """Return the line of the screen: how many tokens there are, and how fast they came."""
        rate = metrics.get("decode_tokens_per_second")
        tokens = sum(len(output["token_ids"]) for output in outputs)
        line = f"{tokens} tokens" + (f", {rate:.1f} a second" if rate else "")
        return line + earlier_told(metrics, "prompts")


def _screen(data: Mapping[str, Any], file: Path) -> Iterator[str]:
    """Yield the paragraphs that show the outputs of the generation ``data``, all of which ``file`` has."""
    outputs = data["outputs"]
    yield from (transcript(output, is_chat=data["is_chat"]) for output in outputs[:_SHOWN])
    if len(outputs) > _SHOWN:
        yield f"… and {len(outputs) - _SHOWN} more, all in {file}"
