"""Runs all the checks there are: ``python -m tests [PYTEST OPTIONS]``.

Style, types and the rules of import, side by side, then the tests. A check that fails stops none of the others, so one
run shows all that is wrong. pytest comes last, so that its closing line is the last line; it only doesn't wait for
mypy, which leaves a core idle once the other checks are done. Beside the checks its tests are imported once: what was
never imported in this environment is compiled then, and not by each of its workers.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from tests.long_form import LONG_FORM

ROOT = Path(__file__).parent.parent
PYTEST_WORKERS = 2
TEST_SECONDS = 600
"""How long a test of the short form may take: one that stands still is a failure with a name then, and tracebacks."""
MYPY = "mypy"
CHECKS = {
    MYPY: ["mypy"],
    "the tests' imports": ["pytest", "--collect-only", "-qq"],
    "lint-imports": ["lint-imports"],
    "ruff check": ["ruff", "check"],
    "ruff format": ["ruff", "format", "--check"],
}
"""In the order in which they begin: the long ones first, since as many run at a time as pytest has workers."""


def with_tests() -> dict[str, str]:
    """Return the environment of this process for one that it starts with a module of the tests, which none installs."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}


def main(pytest_options: Sequence[str]) -> int:
    """Run every check; return 0 if all passed, else 1."""
    # A module stays on one worker, for what its tests share. In the order of the folders, the last modules are short:
    # by the number of tests, which is the default, they are those of few long ones, and a worker waits for the other.
    spread = ["-n", str(PYTEST_WORKERS), "--dist", "loadscope", "--no-loadscope-reorder"]
    limit = ["-o", f"faulthandler_timeout={TEST_SECONDS}", "-o", "faulthandler_exit_on_timeout=true"]
    limit += ["--max-worker-restart=0"]  # else the test that stood still begins again, once for each restart
    with ThreadPoolExecutor(PYTEST_WORKERS) as pool:
        checks = {name: pool.submit(passes, name) for name in CHECKS}
        wait(check for name, check in checks.items() if name != MYPY)
        say("now the tests")
        code = run(["pytest", *spread, *([] if os.environ.get(LONG_FORM) else limit), *pytest_options]).returncode
    failed = [name for name, check in checks.items() if not check.result()]
    if code:
        say(f"pytest exited {code}")
        failed.append("pytest")
    if failed:
        say(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def passes(name: str) -> bool:
    """Run one of ``CHECKS`` and return whether it exited 0; if not, show what it said."""
    done = run(CHECKS[name], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    said = f" exited {done.returncode}\n{done.stdout}" if done.returncode else " passed"
    say(f"== {name}{said}")
    return done.returncode == 0


def run(command: Sequence[str], **streams: int) -> subprocess.CompletedProcess[str]:
    """Run one tool of this environment at the project's root; ``streams`` go to ``subprocess.run``."""
    tool = Path(sys.executable).with_name(command[0])
    return subprocess.run([tool, *command[1:]], cwd=ROOT, env=environment(), text=True, check=False, **streams)


def environment() -> dict[str, str]:
    """Return this process's environment, with one thread for the operators of each of pytest's workers.

    With more, imports start threads, and no command can be a fork: see ``tests.e2e.warm_server``.
    """
    return {"OMP_NUM_THREADS": "1", **os.environ}


def say(line: str) -> None:
    """Write one line now, so that it stands before what the next tool writes."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
