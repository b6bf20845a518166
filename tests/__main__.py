"""Runs all the checks there are: ``python -m tests [PYTEST OPTIONS]``.

Style, types, the rules of import and the tests, one after another. A check that fails stops none of the others, so one
run shows all that is wrong. pytest comes last, so that its closing line is the last line.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
PYTEST_WORKERS = 2
CHECKS = {
    "ruff check": ["ruff", "check"],
    "ruff format": ["ruff", "format", "--check"],
    "mypy": ["mypy"],
    "lint-imports": ["lint-imports"],
}


def main(pytest_options: Sequence[str]) -> int:
    """Run every check; return 0 if all passed, else 1."""
    failed = [name for name, command in CHECKS.items() if not passes(name, command)]
    say(f"{len(CHECKS) - len(failed)} of {len(CHECKS)} checks passed; now the tests")
    # A module stays on one worker, for what its tests share. In the order of the folders, the last modules are short:
    # by the number of tests, which is the default, they are those of few long ones, and a worker waits for the other.
    spread = ["-n", str(PYTEST_WORKERS), "--dist", "loadscope", "--no-loadscope-reorder"]
    if not passes("pytest", ["pytest", *spread, *pytest_options]):
        failed.append("pytest")
    if failed:
        say(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def passes(name: str, command: Sequence[str]) -> bool:
    """Run one tool of this environment at the project's root; return whether it exited 0."""
    say(f"== {name}")
    tool = Path(sys.executable).with_name(command[0])
    code = subprocess.run([tool, *command[1:]], cwd=ROOT, env=environment(), check=False).returncode
    if code:
        say(f"{name} exited {code}")
    return code == 0


def environment() -> dict[str, str]:
    """Return this process's environment, with the cores shared out among pytest's workers."""
    threads = max(1, (os.cpu_count() or 1) // PYTEST_WORKERS)
    return {"OMP_NUM_THREADS": str(threads), **os.environ}


def say(line: str) -> None:
    """Write one line now, so that it stands before what the next tool writes."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
