"""The command on a terminal: a real one, and what stands on it in the end."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.e2e.conftest import COMMAND, Process, environment, heed_signals, warm_server

COLUMNS = 150
_SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\n]|[^\r\n\x1b]+")


def _start(folder: Path, arguments: Sequence[str], terminal: int) -> Process:
    variables = {**environment(), "TERM": "xterm"}
    server = warm_server(variables)
    if server is not None:
        return server.start_on([terminal] * 3, folder, arguments, variables, leads="session")
    return subprocess.Popen(
        [*COMMAND, *arguments], cwd=folder, env=variables, start_new_session=True, text=True,
        stdin=terminal, stdout=terminal, stderr=terminal, preexec_fn=heed_signals,
    )  # fmt: skip


class Terminal:
    """The command with ``arguments`` in ``folder``, its standard streams a terminal; ``shown`` is all that it wrote."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
        self.process = _start(folder, arguments, slave)
        os.close(slave)
        self._bytes = b""

    @property
    def shown(self) -> str:
        return self._bytes.decode(errors="replace")

    def read_until(self, enough: Callable[[str], bool]) -> None:
        """Read what the command writes until it is ``enough``, or there is no more."""
        while not enough(self.shown):
            try:
                more = os.read(self._master, 4096)
            except OSError:  # what a terminal says whose last writer is gone
                return
            if not more:
                return
            self._bytes += more

    def finish(self) -> int:
        """Read all that is to come and return the exit code."""
        self.read_until(lambda _: False)
        os.close(self._master)
        return self.process.wait(timeout=300)

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    @property
    def lines(self) -> list[str]:
        """What stands on the terminal: lines are written over as it would write them over, none is folded."""
        lines, column = [""], 0
        for part in _SEQUENCE.findall(self.shown):
            if part == "\n":
                lines.append("")
            elif part == "\r":
                column = 0
            elif part == "\x1b[2K":
                lines[-1] = ""
            elif part.startswith("\x1b"):
                assert part.endswith("m"), f"{part!r} moves something"
            else:
                before = lines[-1].ljust(column)
                lines[-1] = before[:column] + part + before[column + len(part) :]
                column += len(part)
        return [line.rstrip() for line in lines]
