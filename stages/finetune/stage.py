"""The stage finetune: a dispatched model and a text → tuned weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from offstage.pipeline.errors import Fault
from offstage.pipeline.metrics import Metric
from offstage.pipeline.stage import Artifact, Config, Context, Report, SourceFiles, Stage
from offstage.pipeline.typed_config import PATHS, absolute, read
from offstage.stages.finetune.inputs import CHECKPOINT, STATE, STEPS, FinetuneInputs
from offstage.stages.inference.declared_metrics import FORWARDS, LOADING, WHOLE_RUN, earlier
from offstage.stages.inference.inputs import gather_model, inference_sources
from offstage.stages.inference.progress import earlier_told, read_rows
from offstage.stages.inference.repeats import measured_memory
from offstage.stages.inputs.finetune_options import TEXT, FinetuneOptions, check_training
from offstage.stages.inputs.texts import read_text
from offstage.stages.plan.plan import FILE_NAME as PLAN
from offstage.stages.plan.request.geometry import read_geometry
from offstage.stages.units import format_bytes

FILE_NAME = "finetune.json"
_NO_RECIPE = ("text_file", "save_every")
"""The options that change nothing of the weights."""
_TOLD = ("loss", "gradient_norm", "seconds", "held_bytes")
"""What the record has of each step."""
_SHOWN = 20
"""How many steps are shown on the screen: the first and the last of them."""


@dataclass(frozen=True, slots=True)
class FinetuneConfig:
    """The text, how it is cut into batches, how the weights learn and what is kept on the way."""

    finetune: FinetuneOptions = field(default_factory=FinetuneOptions, metadata={PATHS: {"text_file": absolute}})


class FinetuneStage(Stage[FinetuneInputs]):
    """Leaves the tuned weights in ``checkpoint`` and a line a step in ``steps.jsonl``. It has no live half.

    A build that was killed is gone on with from the state that it saved last.
    """

    name = "finetune"
    doing = "trains"
    version = 2
    needs: tuple[str, ...] = ("dispatch",)
    config_class = FinetuneConfig
    resumes = (STEPS, STATE)
    metrics = (
        *LOADING,
        Metric("trained_parameters", "count"),
        Metric("sequences", "count"),
        Metric("taken_steps", "count"),
        Metric("train_seconds", "seconds", "training"),
        Metric("trained_tokens_per_second", "tokens/s", "trained", leads=True),
        Metric("offload_ratio", "share"),
        # Of what the last forward saved: the activations that stayed where they were made, and those that went.
        Metric("kept_activation_bytes", "bytes", optional=True),
        Metric("offloaded_activation_bytes", "bytes", optional=True),
        *FORWARDS,
        *WHOLE_RUN,
        earlier("steps"),
    )

    def check(self, config: Config) -> Iterable[Fault]:
        """Yield what is wrong with the text, the sizes and the rates, as far as the model needn't be known."""
        yield from check_training(read(FinetuneConfig, config).finetune)

    def examine(self, config: Config) -> Iterable[Fault]:
        """Yield why the model can't be trained on the text."""
        from offstage.stages.finetune.served import check_served

        options = read(FinetuneConfig, config).finetune
        if not list(check_training(options)):
            yield from check_served(options, config["model"])

    def gather(self, context: Context) -> FinetuneInputs:
        """Return the model's identity and placement, the text, and how the weights learn."""
        options = read(FinetuneConfig, context.config).finetune
        text = read_text(TEXT, str(options.text_file))
        return FinetuneInputs(
            corpus=sha256(text.encode()).hexdigest(),
            recipe={name: value for name, value in asdict(options).items() if name not in _NO_RECIPE},
            window=options.sequence(read_geometry(context.config["model"]).context),
            offload_ratio=float(context.artifact("plan").json(PLAN)["offload_ratio"] or 0),
            content=text,
            options=options,
            **gather_model(context),
        )

    def sources(self, inputs: FinetuneInputs, context: Context) -> SourceFiles:
        """Return the files of the text and of the tokenizer."""
        return inference_sources(inputs, context)

    def build(self, inputs: FinetuneInputs, context: Context, folder: Path) -> Any:
        """Train, and write the tuned weights, ``finetune.json`` and ``steps.jsonl``, which grows by a line a step."""
        from offstage.stages.finetune.training import perform

        perform(inputs, context, folder / FILE_NAME)

    def report(self, artifact: Artifact) -> Report:
        """Return what each step came to, metrics and measured memory, the weights' hashes and a table."""
        data, rows = artifact.json(FILE_NAME), read_rows(artifact.path(STEPS))
        rate = data["metrics"]["trained_tokens_per_second"]
        losses = f"loss {rows[0]['loss']:.4f} → {rows[-1]['loss']:.4f} in {len(rows)} step{'s' * (len(rows) > 1)}"
        return Report(
            summary=losses + (f", {rate:.1f} tokens a second" if rate else "") + earlier_told(data["metrics"], "steps"),
            memory=measured_memory(data),
            metrics=data["metrics"],
            experts=data["experts"],
            outputs=tuple(_outputs(artifact, rows)),
            steps=tuple({key: row[key] for key in _TOLD} for row in rows),
            screen="\n".join(_screen(rows, artifact.path(CHECKPOINT))),
        )


def _outputs(artifact: Artifact, rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield what two runs are compared by: the loss and gradient norm of each step, and the hashes of the weights."""
    for row in rows:
        yield {"name": f"step {row['index'] + 1}", "loss": row["loss"], "gradient_norm": row["gradient_norm"]}
    for name, entry in artifact.files.items():
        if name.startswith(f"{CHECKPOINT}/") and name.endswith(".safetensors"):
            yield {"name": name, "bytes": entry.size, "sha256": entry.sha256}


def _screen(rows: Sequence[Mapping[str, Any]], folder: Path) -> Iterator[str]:
    """Yield a table of the steps, and where the weights lie."""
    yield f"{'step':>6}  {'loss':>9}  {'gradient norm':>13}  {'seconds':>8}  memory"
    half = _SHOWN // 2
    shown = rows if len(rows) <= _SHOWN else [*rows[:half], None, *rows[-half:]]
    yield from (f"… {len(rows) - _SHOWN} more in {STEPS}" if row is None else _line(row) for row in shown)
    yield f"the tuned weights are in {folder}"


def _line(row: Mapping[str, Any]) -> str:
    memory = ", ".join(f"{device} {format_bytes(count)}" for device, count in row["held_bytes"].items())
    figures = f"{row['loss']:>9.4f}  {row['gradient_norm']:>13.4f}  {row['seconds']:>8.2f}"
    return f"{row['index'] + 1:>6}  {figures}  {memory}"
