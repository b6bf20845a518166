"""What a checkpoint's identity sees, and what telling it costs.

    python -m tests.benchmarks.identity changes --count 10000
    python -m tests.benchmarks.identity seconds FOLDER

``changes`` makes a checkpoint of 100 MB, changes one byte of its tensors at a time, at random, and undoes it: how many
are seen by the default (samples of every tensor), for each of them looked at as a run does, and how many by
``verify=full`` (the SHA-256 of each file), for as many of them as ``--whole`` says, since all is hashed for each.

``seconds`` times, for a checkpoint of one's own, the first look at it (nothing is remembered; the system is asked to
drop what it has of the files in memory, then not), the next one, and whole runs of the command whose generation is
cached: with the looks remembered, and as the first of its machine, which looks again. Files must not be just written.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from offstage.stages.checkpoints.checkpoint import Checkpoint, fingerprint_of, open_checkpoint
from offstage.stages.checkpoints.hashes import hash_files
from offstage.stages.checkpoints.samples import places
from tests.benchmarks.checkpoints import write_shards
from tests.e2e.conftest import COMMAND, environment

WIDTH, INNER, WORDS = 768, 2048, 8000
_LAYERS = 5
_LOOK = (
    "import sys, time; from pathlib import Path; from offstage.stages.checkpoints.checkpoint import fingerprint_of\n"
    "began = time.perf_counter(); fingerprint_of(Path(sys.argv[1]), allow_links=True)\n"
    "print(time.perf_counter() - began)"
)
_ASKED = ("generate.prompts=[[1,2,3]]", "generate.max_new_tokens=1", "model.allow_links=true")


@dataclass(frozen=True, slots=True)
class Seen:
    """How many of ``count`` changes were seen, and the ``seconds`` that each look took on average."""

    count: int
    seen: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.seen} of {self.count} ({self.seen / self.count:.2%}), {self.seconds * 1e3:.1f} ms a look"


def make_small(folder: Path, layers: int = _LAYERS) -> Path:
    """Write tensors of a Llama's shapes and names into ``folder``: 95 MB in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    shapes: dict[str, Sequence[int]] = {"model.embed_tokens.weight": (WORDS, WIDTH), "lm_head.weight": (WORDS, WIDTH)}
    for layer in (f"model.layers.{number}." for number in range(layers)):
        shapes |= {f"{layer}self_attn.{name}_proj.weight": (WIDTH, WIDTH) for name in "qkvo"}
        shapes |= {f"{layer}mlp.{name}_proj.weight": (INNER, WIDTH) for name in ("gate", "up")}
        shapes |= {f"{layer}mlp.down_proj.weight": (WIDTH, INNER), f"{layer}input_layernorm.weight": (WIDTH,)}
        shapes[f"{layer}post_attention_layernorm.weight"] = (WIDTH,)
    write_shards(((name, shape, 0.02) for name, shape in shapes.items()), folder, torch.bfloat16)
    folder.joinpath("config.json").write_text("{}")
    return folder


@contextmanager
def changed(checkpoint: Checkpoint, chance: random.Random) -> Iterator[None]:
    """Change one byte of the tensors of ``checkpoint``, each as likely as the other; undo it afterwards."""
    extents = list(checkpoint.entries.values())
    (extent,) = chance.choices(extents, weights=[extent.bytes for extent in extents])
    place = extent.begin + chance.randrange(extent.bytes)
    descriptor = os.open(extent.file.path, os.O_RDWR)
    try:
        before = os.pread(descriptor, 1, place)
        os.pwrite(descriptor, bytes([before[0] ^ chance.randrange(1, 256)]), place)
        yield
        os.pwrite(descriptor, before, place)
    finally:
        os.close(descriptor)


def count_seen(folder: Path, *, count: int, whole: int) -> tuple[Seen, Seen]:
    """Return how many of ``count`` changes the default sees, and how many of the first ``whole`` the full hash."""
    checkpoint, chance = open_checkpoint(folder), random.Random(0)
    fingerprint, hashed = fingerprint_of(folder), hash_files(checkpoint)
    seen = [0, 0]
    seconds = [0.0, 0.0]
    for number in range(count):
        with changed(checkpoint, chance):
            began = time.perf_counter()
            seen[0] += fingerprint_of(folder) != fingerprint
            seconds[0] += time.perf_counter() - began
            if number < whole:
                began = time.perf_counter()
                seen[1] += hash_files(open_checkpoint(folder)) != hashed
                seconds[1] += time.perf_counter() - began
    if fingerprint_of(folder) != fingerprint:
        raise RuntimeError("a change wasn't undone")
    return Seen(count, seen[0], seconds[0] / count), Seen(whole, seen[1], seconds[1] / max(1, whole))


def changes(given: argparse.Namespace) -> None:
    """Make a checkpoint, change it, and print what was seen."""
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = make_small(Path(name, "checkpoint"))
        checkpoint = open_checkpoint(folder)
        total = sum(extent.bytes for extent in checkpoint.entries.values())
        looked = sum(sum(size for _, size in places(extent.bytes)) for extent in checkpoint.entries.values())
        print(f"{total / 1e6:.1f} MB in {len(checkpoint.entries)} tensors; samples are {looked / total:.2%} of it")
        default, full = count_seen(folder, count=given.count, whole=min(given.whole, given.count))
    print(f"default      {default}")
    print(f"verify=full  {full}; the first {full.count} of the changes, all of the file hashed for each")


def _forget(folder: Path) -> None:
    """Have the system drop what it has in memory of the files in ``folder``, as far as it can."""
    for path in folder.glob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _look(folder: Path, variables: Mapping[str, str]) -> float:
    done = subprocess.run(
        [sys.executable, "-c", _LOOK, str(folder)], check=True, env=variables, capture_output=True, text=True
    )
    return float(done.stdout)


def _run(checkpoint: Path, folder: Path, variables: Mapping[str, str]) -> float:
    began = time.perf_counter()
    asked = [*COMMAND, f"model.path={checkpoint}", *_ASKED]
    subprocess.run(asked, check=True, cwd=folder, env=variables, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def seconds(given: argparse.Namespace) -> None:
    """Time looks at the checkpoint in a folder, and cached runs of it, and print them."""
    source = given.checkpoint.resolve()
    checkpoint = open_checkpoint(source, allow_links=True)
    print(f"{checkpoint.bytes / 1e9:.2f} GB in {len(checkpoint.files)} files, {len(checkpoint.entries)} tensors")
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        work, home = Path(name), Path(name, "home")
        variables = environment({"XDG_CACHE_HOME": str(home), "PYTHONPATH": str(Path(__file__).parents[2])})
        _forget(source)
        print(f"first look, files dropped from memory  {_look(source, variables):.3f} s")
        shutil.rmtree(home, ignore_errors=True)
        print(f"first look, files in memory as it left {_look(source, variables):.3f} s")
        print(f"look that is remembered                {_look(source, variables):.3f} s")
        if given.looks_alone:
            return
        print(f"run that makes all                     {_run(source, work, variables):.2f} s")
        print(f"cached run                             {_run(source, work, variables):.2f} s")
        shutil.rmtree(home / "offstage" / "looks", ignore_errors=True)
        print(f"cached run, no look remembered         {_run(source, work, variables):.2f} s")
        print(f"cached run                             {_run(source, work, variables):.2f} s")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what ``arguments`` ask for (default: the process's own)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to make what is needed; default: the system's for that")
    what = parser.add_subparsers(required=True)
    asked = what.add_parser("changes", help="how many single-byte changes are seen")
    asked.add_argument("--count", type=int, default=10_000, help="changes (default %(default)s)")
    asked.add_argument("--whole", type=int, default=200, help="as many are hashed whole too (default %(default)s)")
    asked.set_defaults(perform=changes)
    asked = what.add_parser("seconds", help="how long a look and a cached run take")
    asked.add_argument("checkpoint", type=Path, help="the checkpoint's folder")
    asked.add_argument("--looks-alone", action="store_true", help="no runs of the command")
    asked.set_defaults(perform=seconds)
    given = parser.parse_args(arguments)
    given.perform(given)


if __name__ == "__main__":
    main()
