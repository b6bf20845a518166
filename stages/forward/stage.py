"""The stage forward: a dispatched model and inputs → its outputs, by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offstage.pipeline.errors import ConfigError, Fault
from offstage.pipeline.metrics import Metric
from offstage.pipeline.stage import Artifact, Config, Context
from offstage.pipeline.typed_config import read
from offstage.stages.calls.options import ForwardConfig, check_options, identity, is_given
from offstage.stages.forward.inputs import OUTPUTS, ForwardInputs
from offstage.stages.inference.declared_metrics import FORWARDS, LOADING, REPEATS, WHOLE_RUN
from offstage.stages.inference.inputs import gather_model
from offstage.stages.inference.measured_stage import MeasuredStage
from offstage.stages.inputs.media_files import media_libraries

if TYPE_CHECKING:
    from offstage.stages.forward.forwarding import ForwardSession

FILE_NAME = "forward.json"
_SHOWN = 20
"""How many rows of a classifier's answers are shown on the screen."""


class ForwardStage(MeasuredStage[ForwardInputs]):
    """Leaves ``outputs.safetensors`` and ``forward.json``: names, shapes, labels, metrics.

    Its live half calls the model again.
    """

    name = "forward"
    doing = "calls the model"
    version = 3
    needs: tuple[str, ...] = ("dispatch",)
    config_class = ForwardConfig
    file_name = FILE_NAME
    results = "outputs"
    seconds = "forward_seconds"
    metrics = (
        *LOADING,
        Metric(seconds, "seconds", "forwards", leads=True),
        Metric("forwards", "count"),
        Metric("rows", "count"),
        Metric("rows_per_second", "rows/s", "rows a second"),
        *FORWARDS,
        *WHOLE_RUN,
        *REPEATS,
    )

    def check(self, config: Config) -> Iterable[Fault]:
        """Yield what is wrong with what is given, as far as the model need not be known."""
        yield from check_options(read(ForwardConfig, config).forward)

    def examine(self, config: Config) -> Iterable[Fault]:
        """Yield why what is given can't be made the arguments of a call."""
        from offstage.stages.calls.arguments import calls

        given = read(ForwardConfig, config).forward
        if not is_given(given) or list(check_options(given)):
            return  # ``gather`` or ``check`` says it
        try:
            next(calls(given, config["model"]))
        except ConfigError as error:
            yield Fault.of(error)

    def gather(self, context: Context) -> ForwardInputs:
        """Return the model's identity and placement, and all that is given and asked."""
        given = read(ForwardConfig, context.config).forward
        return ForwardInputs(
            asked=identity(given, values=True), media=media_libraries(), given=given, **gather_model(context)
        )

    def session(self, inputs: ForwardInputs, context: Context) -> ForwardSession:
        """Return the model and what it is given, ready to be called."""
        from offstage.stages.forward.forwarding import ForwardSession

        return ForwardSession(inputs, context)

    def screen(self, data: Mapping[str, Any], artifact: Artifact) -> str:
        """Return which outputs there are, and what they say."""
        return "\n".join(_screen(data, artifact.path(OUTPUTS)))

    def describe(self, outputs: Sequence[Mapping[str, Any]], metrics: Mapping[str, Any]) -> str:
        """Return the line of the screen: how many outputs there are, and how fast the rows were."""
        rate = metrics["rows_per_second"]
        several = (metrics["rows"] or 0) > 1
        return f"{len(outputs)} outputs" + (f", {rate:.1f} rows a second" if rate and several else "")


def _screen(data: Mapping[str, Any], file: Path) -> Iterator[str]:
    """Yield the lines that show which outputs ``file`` has, and what they say."""
    cells = [(one["name"], one["dtype"], " x ".join(map(str, one["shape"])) or "scalar") for one in data["outputs"]]
    widths = [max(len(row[column]) for row in cells) for column in range(2)]
    for name, dtype, shape in cells:
        yield f"{name.ljust(widths[0])}  {dtype.ljust(widths[1])}  {shape}"
    yield f"in {file}"
    for rows in data["labels"].values():
        yield ""
        yield from (f"{place}  {_said(row)}" for place, row in enumerate(rows[:_SHOWN]))
        if len(rows) > _SHOWN:
            yield f"… and {len(rows) - _SHOWN} more, all in {file.with_name(FILE_NAME)}"


def _said(row: Sequence[Any]) -> str:
    """Return what a row says: labels with their probabilities, or the label of each token."""
    if row and isinstance(row[0], Mapping):
        return ", ".join(f"{one['label']} {one['probability']:.1%}" for one in row)
    return " ".join(map(str, row))
