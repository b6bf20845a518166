"""The command that a sweep's folder records, as data: which code it names, before anything of it is carried out.

Who resumes a sweep of their own has given that command already; a folder that came from elsewhere may say anything.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterator, Sequence
from importlib import resources
from pathlib import Path

from pipeline.errors import ConfigError
from pipeline.sweeps.record import SweepRecord

_OWN = re.compile(
    r"-m|--multirun|hydra\.(mode=MULTIRUN|sweep\.(dir|subdir)=.*|sweeper\.max_batch_size=\d+)"
    r"|hydra/launcher=(basic|local|submitit_local|submitit_slurm)|hydra/sweeper=(basic|optuna)"
    r"|hydra/sweeper/sampler=(gp|tpe|random)|hydra\.sweeper\.(n_trials=\d+|n_jobs=\d+|direction=(min|max)imize)"
)
"""Arguments of Hydra that choose among what is installed here, and name no code."""


def named_code(record: SweepRecord) -> list[str]:
    """Return the words that trust what ``record`` names as code: arguments of its command, and what its jobs name."""
    return list(dict.fromkeys((*_arguments(record.command), *(word for job in record.jobs for word in job.code))))


def refuse_untrusted(folder: Path, record: SweepRecord, trusted: Collection[str] | None) -> None:
    """Raise a ``ConfigError`` that names the code which ``record`` asks for and the user hasn't said to trust.

    With null the record's author is the user, who is asked nothing.
    """
    untrusted = [word for word in named_code(record) if word not in trusted] if trusted is not None else []
    if untrusted:
        raise ConfigError(
            f"{folder}: its command names code to run: {', '.join(map(repr, untrusted))}; where you trust that code, "
            f"give {_flags(untrusted)}"
        )


def resume_command(folder: Path, record: SweepRecord) -> str:
    """Return the command that does what isn't done of the sweep in ``folder``."""
    return " ".join(["offstage-sweep resume", shlex.quote(str(folder)), _flags(named_code(record))]).rstrip()


def _flags(words: Sequence[str]) -> str:
    return " ".join(shlex.quote(f"--trust={word}") for word in words)


def _arguments(command: Sequence[str]) -> Iterator[str]:
    """Yield the arguments that have Hydra load or call what they name: its options, files from elsewhere."""
    groups = {each.name for each in resources.files("conf").iterdir() if each.is_dir()}
    for argument in command:
        key, _, value = argument.lstrip("+~").partition("=")
        group = re.split(r"[@/]", key)[0]
        is_foreign_file = group in groups and ("/" in value or ".." in value)
        if is_foreign_file or (re.match(r"hydra[./@=]|-", key) and not _OWN.fullmatch(argument)):
            yield argument
