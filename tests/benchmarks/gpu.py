"""The first hour with a GPU: everything that can only be seen there, in the order of what it tells.

    python -m tests.benchmarks.gpu --folder /tmp/offstage-gpu
    python -m tests.benchmarks.gpu --only tests paths
    python -m tests.benchmarks.gpu --simulated --folder /tmp/offstage-simulated

Each section is a command of its own; one that fails or takes too long is told and stops nothing. What is done lies in
``gpu.json`` in the folder, and isn't done again when the benchmark is begun once more, unless it is named; ``gpu.md``
is the same as a table, with the last lines of each section. Needs a GPU, room for checkpoints of 15 GB in the folder,
and for reads from disk the right to drop the page cache. With ``--simulated`` each section is tried from end to end
where there is no GPU, on small models: nothing of it then fails for a reason that has nothing to do with one.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from tests.benchmarks.offload import say
from tests.benchmarks.sides import add_simulated, need_accelerator

LAST_LINES = 30
LINK = "-m tests.benchmarks.link --folder {folder}"


@dataclass(frozen=True, slots=True)
class Section:
    """A ``command`` behind the interpreter, ``{folder}`` in it the benchmark's, and the ``seconds`` it may take."""

    command: str
    seconds: int


@dataclass(frozen=True, slots=True)
class SectionResult:
    """How a section went: its exit code, null where it took too long, its seconds, and its last lines."""

    code: int | None
    seconds: float
    said: str


SECTIONS: Mapping[str, Section] = {
    "tests": Section("-m pytest tests/cuda -q -n 4 -p no:cacheprovider", 600),
    "paths": Section("-m tests.benchmarks.gpu_paths", 600),
    "parts": Section("-m tests.benchmarks.part_overhead", 60),
    "1.1b": Section(f"{LINK} 1.1b --rounds 2 --tokens 16", 420),
    "7b from the host": Section(f"{LINK} 7b --tiers host --rounds 2 --tokens 12", 600),
    "7b from disk": Section(f"{LINK} 7b --tiers disk --rounds 1 --tokens 6", 600),
    "activations": Section("-m tests.benchmarks.activations --places cuda --batch 256 --rounds 3", 600),
}

_TRIED = "-m tests.benchmarks.link --folder {folder} --simulated 0.1b --rounds 1 --tokens 3"
TRIALS: Mapping[str, Section] = {
    "tests": Section("-m pytest tests/cuda -q -p no:cacheprovider", 300),
    "paths": Section("-m tests.benchmarks.gpu_paths --simulated llama mixtral --random 1", 300),
    "parts": Section("-m tests.benchmarks.part_overhead --blocks 2 --rounds 1 --passes 2", 60),
    "1.1b": Section(_TRIED, 600),
    "7b from the host": Section(f"{_TRIED} --tiers host", 600),
    "7b from disk": Section(f"{_TRIED} --tiers disk", 600),
    "activations": Section("-m tests.benchmarks.activations --places simulated --batch 2 --iterations 1", 300),
}
"""The same sections without a GPU."""


def run(section: Section, folder: Path) -> SectionResult:
    """Run ``section`` and return how it went."""
    command = [sys.executable, *(part.format(folder=folder) for part in section.command.split())]
    began = time.perf_counter()
    try:
        done = subprocess.run(
            command, timeout=section.seconds, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        code, said = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        code, said = None, error.stdout or b""
    lines = said.decode(errors="replace").splitlines()
    return SectionResult(code, round(time.perf_counter() - began, 1), "\n".join(lines[-LAST_LINES:]))


def machine() -> dict[str, str]:
    """Return what the figures are of."""
    name = torch.cuda.get_device_properties(0).name if torch.cuda.is_available() else "simulated: they say nothing"
    return {"device": name, "torch": torch.__version__, "python": platform.python_version()}


def table(results: Mapping[str, SectionResult]) -> str:
    """Return the results as Markdown."""
    rows = [f"| {key} | {value} |" for key, value in machine().items()]
    lines = ["| | |", "| --- | --- |", *rows, "", "| section | exit code | seconds |", "| --- | --- | --- |"]
    for name, result in results.items():
        code = "took too long" if result.code is None else result.code
        lines.append(f"| {name} | {code} | {result.seconds} |")
    for name, result in results.items():
        lines += ["", f"## {name}", "", "```", result.said, "```"]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the sections that aren't done yet, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/offstage-gpu"))
    parser.add_argument("--only", nargs="+", choices=SECTIONS, metavar="SECTION", help=", ".join(SECTIONS))
    add_simulated(parser)
    given = parser.parse_args()
    need_accelerator(parser, simulated=given.simulated)
    sections = TRIALS if given.simulated else SECTIONS
    given.folder.mkdir(parents=True, exist_ok=True)
    kept = given.folder / "gpu.json"
    before = json.loads(kept.read_text()) if kept.exists() else {}
    results = {name: SectionResult(**section) for name, section in before.items()}
    for name in given.only or [name for name in SECTIONS if name not in results]:
        results[name] = run(sections[name], given.folder)
        say(f"{name}: exit code {results[name].code}, {results[name].seconds} s\n{results[name].said}")
        kept.write_text(json.dumps({each: asdict(section) for each, section in results.items()}, indent=1))
        kept.with_suffix(".md").write_text(table(results))
    parser.exit(0 if all(result.code == 0 for result in results.values()) else 1)


if __name__ == "__main__":
    main()
