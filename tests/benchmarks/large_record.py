"""What a record of very many tokens costs: to write, to read, to hold against another, to report.

``python -m tests.benchmarks.large_record`` makes two records of ten million generated tokens each (``--tokens``) in a
folder of its own, which is removed. Each step is a process, told by its processor's seconds; to make the random tokens
is a part of writing.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

VOCABULARY, SEQUENCE = 150_000, 4096
_MEASURED = """
import re, sys, time
from pathlib import Path
began = time.process_time()
{}
seconds = time.process_time() - began
peak = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())
print(f"{{seconds:.1f}} {{int(peak[1]) / 1e6:.2f}}", file=sys.stderr)
"""
_OWN = "from tests.benchmarks.large_record import hold, write; folder = Path(sys.argv[1]); "
_RECORD = "from offstage.pipeline.record import RunRecord; "
_STRANGER = "from offstage.pipeline.replay_config import load_foreign; "
_REPORT = "from offstage.pipeline.report.command import run; folder = sys.argv[1]; "
_STEPS = {
    "import": "from offstage.pipeline.replay_command import main",
    "write": f"{_OWN}write(folder / 'a', int(sys.argv[2]))",
    "write another": f"{_OWN}write(folder / 'b', int(sys.argv[2]))",
    "read": f"{_RECORD}RunRecord.load(Path(sys.argv[1]) / 'a').run",
    "read as a stranger's": f"{_STRANGER}load_foreign(Path(sys.argv[1]) / 'a')",
    "compare": f"{_OWN}hold(folder)",
    "report one": f"{_REPORT}run([folder + '/a'])",
    "report --compare": f"{_REPORT}run(['--compare', folder + '/a', folder + '/b'])",
}


def main() -> None:
    """Print what each step takes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=10_000_000, help="how many tokens a record has")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        _describe(Path(folder))
        print(f"{'':<22}{'CPU s':>8}{'peak GB':>9}")
        for name, code in _STEPS.items():
            command = [sys.executable, "-c", _MEASURED.format(code), folder, str(given.tokens)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            seconds, peak = done.stderr.split()[-2:]
            print(f"{name:<22}{seconds:>8}{peak:>9}", flush=True)
        size, lines = _size(Path(folder, "a", "run.json"))
        print(f"run.json: {size / 1e6:.1f} MB in {lines:,} lines")


def _describe(folder: Path) -> None:
    """Run a plan, whose record is the pattern: a stranger's is held to a config that can be run."""
    plan = ["stop_after=plan", f"hydra.run.dir={folder}/pattern"]
    command = [sys.executable, "-c", "from offstage.pipeline.commands import offstage; offstage()", *plan]
    subprocess.run(command, check=True, capture_output=True, cwd=folder)


def _size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    return len(data), data.count(b"\n")


def write(folder: Path, tokens: int) -> None:
    """Write the record of a run that made so many ``tokens``, as a run does: a stage's outputs, then its end."""
    from offstage.pipeline.record import RunRecord
    from offstage.pipeline.stage import Report

    config = json.loads((folder.parent / "pattern" / "run.json").read_text())["config"]
    made = random.Random(0)
    outputs = tuple(
        {
            "prompt": f"prompt {number}",
            "prompt_tokens": 2,
            "text": "word " * 256,
            "token_ids": [made.randrange(VOCABULARY) for _ in range(min(SEQUENCE, tokens - number * SEQUENCE))],
            "batch": number,
        }
        for number in range(-(-tokens // SEQUENCE))
    )
    record = RunRecord.start(folder, overrides=[], config=config, environment={})
    record.merge(Report(outputs=outputs))
    record.note_series("cpu", [(0.0, 1)])
    record.note(packages={})
    record.finish("completed")


def hold(folder: Path) -> None:
    """Hold the two records against each other, as a replay does."""
    from offstage.pipeline.record import RunRecord
    from offstage.pipeline.replay import compare

    assert compare(RunRecord.load(folder / "a").run, RunRecord.load(folder / "b").run).same


if __name__ == "__main__":
    main()
