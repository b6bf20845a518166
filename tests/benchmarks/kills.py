"""Many prompts, killed again and again, and gone on with: is what comes out that of a run that nothing stopped?

    python -m tests.benchmarks.kills --prompts 500 --kills 10

Kills by SIGKILL, at moments that are drawn: once so many answers are on the disk, and then some milliseconds later. The
first run of a folder pays for imports; the others are forked from a process that has them. Prints a line a kill, and
whether ``generations.jsonl`` is the same byte for byte; exits 1 where it isn't.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.faults.fork_server import ForkServer

_RUN, _END = "generations.jsonl", b"\n"


def write_prompts(file: Path, count: int, *, seed: int = 7) -> None:
    """Write ``count`` prompts of token ids into ``file``, of 1 to 23 tokens; the fourth has options of its own."""
    chance = random.Random(seed)
    lines = [{"token_ids": [chance.randrange(3, 200) for _ in range(chance.randrange(1, 24))]} for _ in range(count)]
    lines[3]["max_new_tokens"] = 2
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


class KilledRuns:
    """Runs of one command in ``folder``, in processes forked from ``server``."""

    def __init__(self, server: ForkServer, folder: Path, options: Sequence[str]) -> None:
        self._server, self._folder, self._options = server, folder, options
        folder.mkdir(parents=True, exist_ok=True)

    def finish(self) -> bytes:
        """Run to the end, and return what the run has generated. What it imports, the server has from then on."""
        modules = self._folder / "modules.json"
        self._server.fork(self._options, folder=self._folder, modules=modules)
        code = self._server.go()
        if code:
            raise RuntimeError(f"exit code {code}: {self._folder.joinpath('stderr').read_text()}")
        self._server.import_modules(json.loads(modules.read_text()))
        (finished,) = self._folder.glob(f"outputs/cache/generate/[!.]*/{_RUN}")
        return finished.read_bytes()

    def kill(self, *, lines: int, seconds: float = 0.0) -> bytes | None:
        """Run until ``lines`` are on the disk and ``seconds`` more, kill it, and return what lasts; null: it ended."""
        process = self._server.fork(self._options, folder=self._folder)
        with ThreadPoolExecutor(1) as pool:
            ended = pool.submit(self._server.go)
            while not ended.done() and self.unfinished().count(_END) < lines:
                time.sleep(0.002)
            time.sleep(seconds)
            if not ended.done():
                os.kill(process, signal.SIGKILL)
        return self.unfinished() if ended.result() == -signal.SIGKILL else None

    def unfinished(self) -> bytes:
        """Return what a run that hasn't ended has on the disk."""
        parts = list(self._folder.glob(f"outputs/cache/generate/.tmp-*/{_RUN}"))
        return parts[0].read_bytes() if parts else b""


def main() -> int:
    """Print what each kill left, and return 1 where the end isn't that of an uninterrupted run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=500)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--option", action="append", default=[], help="an override, e.g. generate.do_sample=true")
    given = parser.parse_args()
    chance = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as folder, ForkServer() as server:
        root = Path(folder)
        write_prompts(root / "prompts.jsonl", given.prompts)
        options = [f"generate.prompts_file={root / 'prompts.jsonl'}", "generate.max_new_tokens=6"]
        options += ["generate.batch_size=4", *given.option]
        whole = KilledRuns(server, root / "whole", options).finish()
        say(f"uninterrupted: {whole.count(_END)} lines")
        killed = KilledRuns(server, root / "killed", options)
        for lines in sorted(chance.randrange(1, given.prompts * 19 // 20) for _ in range(given.kills)):
            later = chance.random() / 20
            left = killed.kill(lines=lines, seconds=later)
            lasts = "ended" if left is None else f"{left.count(_END)} last"
            say(f"killed {later * 1000:.0f} ms after {lines:>4} lines were there: {lasts}")
        same = killed.finish() == whole
    say("the same byte for byte" if same else "DIFFERENT")
    return 0 if same else 1


def say(line: str) -> None:
    """Print one line now."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
