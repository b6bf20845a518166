"""Processes that keep cores busy while something else is measured."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

COUNTING = "while True: pass"
"""Moves no memory."""
COPYING = "import numpy as np\na = np.ones(2**28, np.uint8)\nb = a.copy()\nwhile True: np.copyto(b, a)"


@contextmanager
def busy(count: int, code: str = COUNTING) -> Iterator[None]:
    """Have so many processes run ``code`` meanwhile."""
    running = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()
