"""The contract between the runner and a stage.

A stage has two halves. The stored half is an artifact: files under ``outputs/cache/STAGE/KEY/``, written once and
never changed. The live half (a module, placed tensors) is made from it on demand, the first time a later stage asks.
The runner knows no stage by name: it finds them among the entry points of the group ``offstage.stages``.

A stage's module is imported even when its artifact is cached, so it imports nothing heavy at its top (no torch, no
transformers): what needs them it imports where it works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from offstage.pipeline.decoding import decode
from offstage.pipeline.errors import Fault, StorageError
from offstage.pipeline.regular_files import read_json

Config = Mapping[str, Any]
"""A resolved config: plain dicts, lists and scalars. ``max_memory`` has str keys ("0", "cpu") and str values."""


def model_name(config: Config) -> str:
    """Return what the model of ``config`` goes by: its path or Hub id, else the class that makes it; maybe nothing."""
    model = config.get("model") or {}
    return str(model.get("path") or model.get("_target_") or "")


Inputs = TypeVar("Inputs")
"""What a stage depends on: a frozen dataclass of its own."""
Content = TypeVar("Content")
"""What a file of an artifact says: a dataclass."""

TENSORS = "weights.json"
"""The file beside a run's record that has what was seen of each tensor of its weights."""
MEASURED = "hardware"
"""The folder of the cache where stages keep what they measured of the machine; a replay goes by the same rates."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of an artifact, as its manifest lists it: size in bytes and SHA-256 in hex."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Artifact:
    """The stored half of a stage: the files of one published folder."""

    stage: str
    key: str
    folder: Path
    files: Mapping[str, FileEntry]

    def path(self, name: str) -> Path:
        """Return where the file ``name`` lies."""
        return self.folder / name

    def json(self, name: str) -> Any:
        """Return what the JSON file ``name`` holds."""
        return read_json(self.path(name))

    def read(self, kind: type[Content], name: str) -> Content:
        """Return what the JSON file ``name`` says, one of ``kind``; a ``StorageError`` where it says another thing."""
        try:
            return decode(kind, self.json(name))
        except ValueError as error:
            raise StorageError(f"{self.path(name)}{error}; remove {self.folder}, and it is made again") from error

    def digest(self, name: str) -> str:
        """Return the SHA-256 of the file ``name``: what a later stage that depends on its content puts in its key."""
        return self.files[name].sha256


@dataclass(frozen=True, slots=True)
class Report:
    """What a stage's artifact adds to the run record and to the summary on the screen.

    ``summary`` is one short line. ``memory``, ``metrics``, ``outputs``, ``experts``, ``repeats``, ``steps``, ``hosts``
    and ``layers`` go under those names of ``run.json``; ``screen`` is shown after the summary table, and ``remarks``,
    what must be known of the metrics by who uses them, below these. ``experts`` is what those of each layer came to,
    where a mixture's wait until they are wanted: layer → counts by name. ``repeats`` has each time that the stage's
    work was measured, with ``earlier`` where another run did it and ``counts`` where the metrics are made of it.
    ``steps`` are those of a training: loss, norm of the gradient, seconds and bytes held, in their order. ``hosts`` are
    those that the model is divided among, where there are several, each with what is known of it so far. ``layers``
    says where the model's lie, those together that are executed one after another and lie alike. ``model`` says what
    was run: its ``class``, how many ``parameters`` by dtype, and its ``bytes``. A metric that the stage doesn't declare
    is kept as a number of nothing, and no table has it. Keys of ``outputs``, ``repeats`` and ``steps`` that
    ``offstage.pipeline.run_schema`` names are of its types; others are the stage's own.
    """

    summary: str = ""
    memory: Mapping[str, Mapping[str, int | None]] = field(default_factory=dict)
    metrics: Mapping[str, float | int | str | None] = field(default_factory=dict)
    outputs: tuple[Mapping[str, Any], ...] = ()
    screen: str = ""
    remarks: tuple[str, ...] = ()
    experts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    repeats: tuple[Mapping[str, Any], ...] = ()
    steps: tuple[Mapping[str, Any], ...] = ()
    hosts: tuple[Mapping[str, Any], ...] = ()
    layers: tuple[Mapping[str, Any], ...] = ()
    model: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SourceFiles:
    """The files that a stage works on, by their content: for the record, and for a replay to be held against.

    ``inputs`` goes under that name of ``run.json``: a section each for ``weights``, ``config``, ``tokenizer``,
    ``adapter``, ``data``, ``code`` and the like, of a file's name, or the key that names it, → its SHA-256. ``weights``
    has ``files``, a list of ``name``, ``size``, and the digests ``header``, ``sampled`` and ``sha256``, null where they
    aren't known; ``config``, that of the model's config; and ``verify``, how deep was looked. ``tensors`` has of each
    file's tensors dtype, shape and digest; it is too long for a record, and lies beside it.
    """

    inputs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    tensors: Mapping[str, Mapping[str, Sequence[Any]]] = field(default_factory=dict)


class Context(Protocol):
    """What the runner lends to a stage."""

    @property
    def config(self) -> Config:
        """The run's resolved config."""

    @property
    def cache(self) -> Path:
        """The cache's root, ``outputs/cache``: for stores that several artifacts share."""

    @property
    def host_peak(self) -> Callable[[], int]:
        """Returns the peak of anonymous host memory since the run began, in bytes."""

    @property
    def show_text(self) -> Callable[[str], object] | None:
        """Adds to the text that is on a terminal while a stage makes it; null where nobody looks.

        A stage that shows text so has shown all that its report's ``screen`` says.
        """

    def artifact(self, stage: str) -> Artifact:
        """Return the artifact of an earlier stage; a ``ConfigError`` where the stage isn't in the run's list."""

    def live(self, stage: str) -> Any:
        """Return the live half of an earlier stage, made now if nobody asked before."""


@runtime_checkable
class Stage(Protocol[Inputs]):
    """One stage of the pipeline. Instances hold no state: the runner makes one a run.

    A stage that derives from this class needs no ``check``, ``examine`` or ``revive`` where these have nothing to do.

    A stage with an attribute ``resumes``, names of files, gets those that a build left that was killed or interrupted,
    and goes on there; others begin with an empty folder. Names that begin with a dot are of folders that the build has
    for itself: they last until all of the artifact is on the disk, and are no part of it.

    One with an attribute ``metrics``, a sequence of ``Metric``, declares those that it reports: by that they have their
    units and their places in every table, in exports, comparisons and trackers, and a search can go by them.

    One with an attribute ``doing`` has a terminal say that beside its name while it is at work.

    One with an attribute ``measures`` that is true is measured as the keys ``measure`` of the config say, beyond what
    its artifact came with: see ``lacks_metrics`` and ``measure``.

    One with a method ``prepare_machine(config, cache)`` has it called before the first job of a sweep on this machine,
    to measure then, while nothing runs, what the jobs will go by and to keep it in the cache.

    One with a method ``begin_measuring(config, cache)`` has it called as soon as it is known that the stage will work,
    before others import what they need: to begin beside that what takes a process of its own. It returns at once.

    One with a method ``sources(inputs, context)`` returns the ``SourceFiles`` that ``inputs`` were gathered from.

    What a stage depends on is gathered once a run, as a value. The key is made from that value and the work is done
    from it, so that what lies under a key is what the key says, whatever the machine would answer by then.
    """

    name: str
    version: int
    """Raised by hand when the meaning or the format of the artifact changes; a part of every key."""
    needs: tuple[str, ...]
    """The stages whose live halves ``build`` or ``revive`` asks for."""
    config_class: type[Any]
    """The stage's keys: a frozen dataclass whose fields are keys of the root config, with their types and defaults.

    A stage has them below its own name, as one field that is a dataclass itself: ``mystage.key=3``. They are there as
    soon as the stage is installed, whether a run lists it or not. What a stage gets of a config, ``read`` makes one
    of these of it (``offstage.pipeline.typed_config``); their types are checked by then, and what its fields' metadata
    names as ``PATHS`` is absolute.
    """

    def check(self, config: Config) -> Iterable[Fault]:
        """Yield what is wrong with the config, as far as nothing heavy must be imported to see it.

        Every key is there and of its type: one that isn't is reported already, and has its default here.
        """
        return ()

    def examine(self, config: Config) -> Iterable[Fault]:
        """Yield what is wrong with the config and needs model code to be seen.

        Asked, before any work, only of a stage whose artifact isn't known to be cached: what is cached was examined.
        """
        return ()

    def gather(self, context: Context) -> Inputs:
        """Return all that the artifact depends on: config, files, earlier artifacts, what the machine says."""

    def build(self, inputs: Inputs, context: Context, folder: Path) -> Any:
        """Write the stored half into ``folder``. Returns the live half if it was made on the way, else None."""

    def revive(self, inputs: Inputs, context: Context) -> Any:
        """Return the live half, made from the stored half of this stage and those before it; None where it has none."""
        return None

    def report(self, artifact: Artifact) -> Report:
        """Return what the artifact adds to the run record."""

    def lacks_metrics(self, context: Context) -> bool:
        """Return whether the run asks for metrics that aren't there, of an artifact that was cached."""
        return False

    def measure(self, inputs: Inputs, context: Context, report: Report, *, is_new: bool) -> Report:
        """Return ``report`` of the artifact with the metrics that the run asks for; what is lacking is measured now.

        ``is_new`` says whether this run has made the artifact.
        """
        return report


def keyed(inputs: Any) -> dict[str, object]:
    """Return the fields of a stage's inputs that its key is made of, each a value that ``fingerprint`` takes.

    They are those that two inputs are compared by. A field with ``compare=False`` is there for the work alone: what
    follows from the others (a file that one is the hash of, read already), or changes nothing of the stored half.
    """
    return {entry.name: getattr(inputs, entry.name) for entry in fields(inputs) if entry.compare}
