"""Where the traceback of an unforeseen error is kept: in the run's log, else in a file of its own."""

from __future__ import annotations

import logging
import tempfile
import traceback
from pathlib import Path


def keep_traceback(error: BaseException) -> str:
    """Write the traceback of ``error`` to ``run.log``, or where there is no log or no room, elsewhere; say where."""
    text = "".join(traceback.format_exception(error))
    handlers = logging.getLogger().handlers
    logs = [Path(handler.baseFilename) for handler in handlers if isinstance(handler, logging.FileHandler)]
    for place in (*logs, None):
        try:
            return f"its traceback is in {_write(text, place)}"
        except OSError:
            continue
    return "HYDRA_FULL_ERROR=1 shows its traceback"


def _write(text: str, place: Path | None) -> Path:
    """Append ``text`` to the file ``place``, null: one that is made for it, and return it."""
    if place is None:
        place = Path(tempfile.mkdtemp(prefix="offstage-"), "run.log")
    with place.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)
    return place
